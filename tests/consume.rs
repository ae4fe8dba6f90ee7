//! Real broker: records in, handlers run, offsets committed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use reliable_consumer::{Builder, HandlerResult, Message, Ordering, ReliableConsumer, Report, Text};
use reliable_consumer_testing::{Cluster, Record, cluster, eventually, unique};

fn consumer(cluster: &Cluster, group: &str, topic: &str) -> Builder {
    ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(group)
        .topic(topic)
        .commit_interval(Duration::from_millis(100))
}

type Seen = Arc<Mutex<Vec<(i32, i64, String)>>>;

fn note(seen: &Seen, message: &Message<Text>) {
    let place = (message.partition(), message.offset(), message.key_str().unwrap_or_default().to_owned());
    seen.lock().unwrap().push(place);
}

fn committed(cluster: &Cluster, group: &str, topic: &str) -> Vec<i64> {
    cluster.committed(group, topic).into_iter().map(|committed| committed.offset.unwrap_or(-1)).collect()
}

/// Runs until everything in the topic is committed, then shuts down.
async fn run_to_the_end(cluster: &Cluster, group: &str, topic: &str, builder: Builder, seen: &Seen) -> Report {
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let seen = Arc::clone(seen);
    let run = tokio::spawn(async move {
        consumer
            .run(async move |message: &Message<Text>| -> HandlerResult {
                note(&seen, message);
                Ok(())
            })
            .await
    });
    let ends = cluster.end_offsets(topic);
    eventually("everything to be committed", Duration::from_secs(30), || committed(cluster, group, topic) == ends);
    handle.shutdown().unwrap();
    run.await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_is_handled_once_and_committed_in_each_order() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 4, &[]);
    let records = (0..20_000).map(|n| Record::value(format!("v{n}")).key(format!("k{}", n % 100)));
    cluster.produce(&topic, records);
    for ordering in [Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition] {
        let group = unique("group");
        let seen = Seen::default();
        let builder = consumer(&cluster, &group, &topic).ordering(ordering);
        let report = run_to_the_end(&cluster, &group, &topic, builder, &seen).await;
        assert_eq!((report.received, report.handled), (20_000, 20_000), "{ordering:?}");
        let seen = seen.lock().unwrap();
        let mut last = HashMap::new();
        let mut places: Vec<_> = seen.iter().map(|(partition, offset, _)| (*partition, *offset)).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 20_000, "{ordering:?}");
        for (partition, offset, key) in seen.iter() {
            let lane = match ordering {
                Ordering::ByKey => key.clone(),
                _ => partition.to_string(),
            };
            let before = last.insert(lane, *offset);
            if ordering != Ordering::Unordered {
                assert!(before.is_none_or(|before| before < *offset), "{ordering:?} was kept");
            }
        }
    }
}
