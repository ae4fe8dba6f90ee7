//! How far a long command is: on standard error, where somebody looks at it.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Letters between two looks at the clock.
const STEP: u64 = 512;

pub struct Progress {
    bar: ProgressBar,
    seen: u64,
}

impl Progress {
    /// Hidden where standard error is no terminal.
    pub fn new(what: &'static str, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template(
            "{msg} {wide_bar} {percent}%  {human_pos} of {human_len}  {per_sec}  {eta} left",
        );
        bar.set_style(style.expect("the template is sound"));
        bar.set_message(what);
        if total > 10 * STEP {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self { bar, seen: 0 }
    }

    /// So many by now.
    pub fn at(&mut self, seen: u64) {
        self.seen = seen;
        self.bar.set_position(seen);
    }

    /// Says something in between, also where the bar is hidden.
    pub fn say(&self, what: &str) {
        self.bar.suspend(|| eprintln!("{what}"));
    }

    pub fn step(&mut self) {
        self.seen += 1;
        if self.seen.is_multiple_of(STEP) {
            self.bar.set_position(self.seen);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
