//! Tables for people.

use std::io::{self, Write};

use console::{Term, measure_text_width, style, truncate_str};

/// Rows of cells, in which everything has to be [harmless](crate::text) already.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

struct Column {
    name: &'static str,
    numbers: bool,
}

impl Table {
    /// Names of columns; those of numbers begin with `#`, which is not shown.
    pub fn new<const N: usize>(names: [&'static str; N]) -> Self {
        let columns = names.map(|name| match name.strip_prefix('#') {
            Some(name) => Column {
                name,
                numbers: true,
            },
            None => Column {
                name,
                numbers: false,
            },
        });
        Self {
            columns: columns.into(),
            rows: Vec::new(),
        }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns.len());
        self.rows.push(cells.into());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// On a terminal, rows are cut where its lines end.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let terminal = Term::stdout();
        let width = terminal.is_term().then(|| usize::from(terminal.size().1));
        self.write_within(width, out)
    }

    fn write_within(&self, width: Option<usize>, out: &mut impl Write) -> io::Result<()> {
        let widths: Vec<_> = self
            .columns
            .iter()
            .enumerate()
            .map(|(at, column)| {
                let cells = self.rows.iter().map(|row| measure_text_width(&row[at]));
                cells.max().unwrap_or(0).max(column.name.len())
            })
            .collect();
        let names: Vec<_> = self.columns.iter().map(|it| it.name.to_owned()).collect();
        let heading = self.line(&names, &widths, width);
        writeln!(out, "{}", style(heading).bold())?;
        for row in &self.rows {
            writeln!(out, "{}", self.line(row, &widths, width))?;
        }
        Ok(())
    }

    fn line(&self, cells: &[String], widths: &[usize], width: Option<usize>) -> String {
        let mut line = String::new();
        for ((cell, column), width) in cells.iter().zip(&self.columns).zip(widths) {
            let padding = " ".repeat(width - measure_text_width(cell).min(*width));
            if !line.is_empty() {
                line.push_str("  ");
            }
            match column.numbers {
                true => line.extend([&*padding, cell]),
                false => line.extend([cell, &*padding]),
            }
        }
        let line = line.trim_end();
        match width {
            Some(width) => truncate_str(line, width, "…").into_owned(),
            None => line.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(table: &Table, width: Option<usize>) -> String {
        let mut out = Vec::new();
        table.write_within(width, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        console::strip_ansi_codes(&text).into_owned()
    }

    #[test]
    fn columns_stand_under_their_names_and_numbers_to_the_right() {
        let mut table = Table::new(["TOPIC", "#LAG", "WHY"]);
        table.row(["größe".into(), "5".into(), "x".into()]);
        table.row(["a".into(), "12345".into(), "a long reason".into()]);
        let expected = "TOPIC    LAG  WHY\ngröße      5  x\na      12345  a long reason\n";
        assert_eq!(written(&table, None), expected);
        assert_eq!(
            written(&table, Some(12)).lines().last(),
            Some("a      1234…")
        );
    }
}
