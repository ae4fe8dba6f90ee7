//! Real brokers for the tests of `reliable-consumer`, and what a test asks of them.
//!
//! ```no_run
//! use reliable_consumer_testing::{Record, cluster};
//!
//! let Some(cluster) = cluster() else { return };
//! let topic = cluster.create_topic("orders", 4, &[]);
//! cluster.produce(&topic, [Record::value("paid").key("order-1")]);
//! assert_eq!(cluster.read_all(&topic)[0].key.as_deref(), Some(b"order-1".as_slice()));
//! ```
//!
//! Every call blocks until it is done and panics, saying what it waited for, when it cannot be:
//! an async test that uses it runs on the multi-threaded runtime.

mod cluster;
mod name;
mod proxy;
mod records;
mod service;

use std::{
    process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

pub use cluster::{Cluster, Committed, cluster, own_cluster, own_cluster_with, secure_cluster};
pub use name::Name;
pub use proxy::Proxy;
pub use records::{Record, StoredRecord};
pub use service::{Service, ServiceKind, own_pooler, own_service, own_standby, service};

/// A name that no other test, process or earlier run uses: for topics, groups, clusters.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let since_epoch = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("the clock is past 1970");
    format!(
        "{prefix}-{:x}-{}-{count}",
        since_epoch.as_millis(),
        process::id()
    )
}

/// Waits until `condition` holds, looking every 20 ms; panics with `what` after `within`.
#[track_caller]
pub fn eventually(what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < within,
            "waited {within:?} in vain for {what}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}
