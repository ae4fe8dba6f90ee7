//! Different topics, different handlers, different payloads: one consumer.

use std::{collections::HashMap, sync::Arc};

use crate::{
    ByType, Decoder, Handler, Payload,
    execute::{Drive, Driver},
    kafka::Lookup,
    redrive::redriven_from,
};

/// Which handler is for which topic.
///
/// ```no_run
/// use reliable_consumer::{Bytes, HandlerResult, Message, ReliableConsumer, Routes, Text};
///
/// async fn sign_up(_: &Message<Text>) -> HandlerResult { Ok(()) }
/// async fn payment(_: &Message<Bytes>) -> HandlerResult { Ok(()) }
///
/// # async fn example(consumer: ReliableConsumer) -> Result<(), Box<dyn std::error::Error>> {
/// let routes = Routes::new().topic("sign-ups", sign_up).topic("payments", payment);
/// consumer.run_routes(routes).await?;
/// # Ok(())
/// # }
/// ```
///
/// A topic that is assigned and has no route ends the run with an error: nothing is passed over silently.
#[derive(Default)]
pub struct Routes {
    by_topic: HashMap<String, Arc<dyn Drive>>,
    otherwise: Option<Arc<dyn Drive>>,
}

impl Routes {
    /// No routes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records of this topic go to this handler.
    pub fn topic<P: Payload, H: Handler<P>>(self, topic: impl Into<String>, handler: H) -> Self {
        self.topic_decoding(topic, ByType, handler)
    }

    /// Like [`topic`](Self::topic), with a decoder that has state.
    pub fn topic_decoding<P, D, H>(
        mut self,
        topic: impl Into<String>,
        decoder: D,
        handler: H,
    ) -> Self
    where
        P: Send + Sync + 'static,
        D: Decoder<P>,
        H: Handler<P>,
    {
        self.by_topic
            .insert(topic.into(), Arc::new(Driver::new(handler, decoder)));
        self
    }

    /// Records of all other topics go to this handler.
    pub fn otherwise<P: Payload, H: Handler<P>>(mut self, handler: H) -> Self {
        self.otherwise = Some(Arc::new(Driver::new(handler, ByType)));
        self
    }

    pub(super) fn into_lookup(self, group: Arc<str>) -> Lookup {
        Box::new(move |topic| {
            let sent_back = || self.by_topic.get(redriven_from(topic, &group)?);
            self.by_topic
                .get(topic)
                .or_else(sent_back)
                .or(self.otherwise.as_ref())
                .cloned()
        })
    }
}

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Routes")
            .field("topics", &self.by_topic.keys())
            .field("otherwise", &self.otherwise.is_some())
            .finish()
    }
}
