//! The differences of two values, by the names of their serialized fields.

use crate::error::{Error, Result};
use serde::Serialize;

/// Refuses two values that serialize differently, naming every field that does.
///
/// # Errors
/// `is_mismatch`, in the form `what: field is saved, not expected`.
pub fn differs<T: Serialize>(what: &str, saved: &T, expected: &T) -> Result<()> {
    match differences(saved, expected).map_err(|error| error.within(what))? {
        found if found.is_empty() => Ok(()),
        found => Err(Error::mismatch(format_args!("{what} of the saved state differs: {}", found.join(", ")))),
    }
}

/// The fields in which two values serialize differently, in the form `field is this, not that`.
pub fn differences<T: Serialize>(this: &T, that: &T) -> Result<Vec<String>> {
    let value = |x: &T| serde_json::to_value(x).map_err(Error::argument);
    let mut found = Vec::new();
    collect_differences("", &value(this)?, &value(that)?, &mut found);
    Ok(found)
}

fn collect_differences(path: &str, saved: &serde_json::Value, want: &serde_json::Value, found: &mut Vec<String>) {
    match (saved, want) {
        (serde_json::Value::Object(a), serde_json::Value::Object(b)) => {
            let null = serde_json::Value::Null;
            let mut keys: Vec<_> = a.keys().chain(b.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                collect_differences(&path, a.get(key).unwrap_or(&null), b.get(key).unwrap_or(&null), found);
            }
        }
        _ if saved == want => {}
        (serde_json::Value::Array(a), serde_json::Value::Array(b)) if a.len() == b.len() => {
            // One entry is enough to name a row.
            if let Some(at) = (0..a.len()).find(|&at| a[at] != b[at]) {
                collect_differences(&format!("{path}[{at}]"), &a[at], &b[at], found);
            }
        }
        _ => {
            let short = |value: &serde_json::Value| {
                let text = value.to_string();
                if text.len() > 60 { "another value".to_owned() } else { text }
            };
            found.push(format!("{path} is {}, not {}", short(saved), short(want)));
        }
    }
}
