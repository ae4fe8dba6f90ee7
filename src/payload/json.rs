//! JSON payloads.

use std::{
    any::type_name,
    ops::{Deref, DerefMut},
};

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::{DecodeError, Payload, value};
use crate::record::Record;

/// A payload that is JSON, decoded by serde to any type that owns its data.
///
/// An error names the type and the place in the JSON, and nothing of what stands there: it goes to logs and to the dead
/// letter's headers.
///
/// ```
/// use reliable_consumer::{HandlerResult, Json, Message};
///
/// #[derive(serde::Deserialize)]
/// struct SignUp { email: String }
///
/// async fn register(message: &Message<Json<SignUp>>) -> HandlerResult {
///     println!("welcome {}", message.payload().email);
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Json<T>(pub T);

impl<T> Deref for Json<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Json<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: DeserializeOwned + Send + Sync + 'static> Payload for Json<T> {
    fn decode(record: &Record) -> Result<Self, DecodeError> {
        let value = value(record, type_name::<Self>())?;
        serde_json::from_slice(value).map(Json).map_err(|error| {
            DecodeError::invalid(format!(
                "{} for `{}` at line {} column {}",
                reason(&error),
                type_name::<T>(),
                error.line(),
                error.column(),
            ))
        })
    }
}

/// serde's own messages quote the payload, but for the one about what is *not* in it.
fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    if let Some((field, _)) = message
        .strip_prefix("missing field `")
        .and_then(|rest| rest.split_once('`'))
    {
        return format!("missing field `{field}`");
    }
    match error.classify() {
        Category::Data => "JSON of another shape than needed",
        Category::Eof => "JSON that ends too early",
        Category::Syntax | Category::Io => "malformed JSON",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    #[derive(Debug, serde::Deserialize, PartialEq)]
    struct Order {
        id: u32,
        state: State,
    }

    #[derive(Debug, serde::Deserialize, PartialEq)]
    enum State {
        Paid,
    }

    fn decode(json: &str) -> Result<Json<Order>, DecodeError> {
        Json::decode(&Message::builder().value(json).record())
    }

    #[test]
    fn json_decodes_to_its_type() {
        let order = decode(r#"{"id": 7, "state": "Paid"}"#).unwrap();
        assert_eq!(order.state, State::Paid);
    }

    // D13
    #[test]
    fn poison_json_is_invalid_and_its_error_quotes_nothing_of_it() {
        for poison in [
            r#"{"id": "secret", "state": "Paid"}"#,
            r#"{"id": 7, "state": "secret"}"#,
            r#"{"id": 7, "state": "Paid"} secret"#,
            r#"{"secret"#,
            "secret",
        ] {
            let error = decode(poison).expect_err(poison);
            assert!(matches!(error, DecodeError::Invalid(_)));
            let shown = format!("{error} {error:?}");
            assert!(shown.contains("line 1 column"), "{shown}");
            assert!(shown.contains("Order"), "{shown}");
            assert!(!shown.contains("secret"), "{shown}");
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = decode(r#"{"id": 7}"#).expect_err("there is no state");
        assert!(
            error.to_string().contains("missing field `state`"),
            "{error}"
        );
    }
}
