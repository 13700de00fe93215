//! Values that are made once per key.

use crate::error::Result;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// Values by key, each made by the first thread that asks for it. Only threads that ask for the same key wait meanwhile.
#[derive(Debug)]
pub(crate) struct PerKey<K, V> {
    /// The outer lock is held to find a slot, a slot's own while it is filled.
    slots: Mutex<HashMap<K, Slot<V>>>,
}

type Slot<V> = Arc<Mutex<Option<V>>>;

impl<K, V> Default for PerKey<K, V> {
    fn default() -> Self {
        Self { slots: Mutex::default() }
    }
}

impl<K: Eq + Hash, V: Clone> PerKey<K, V> {
    /// The value of `key`. A failure is not kept.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get_or_make(&self, key: K, make: impl FnOnce() -> Result<V>) -> Result<V> {
        let slot = self.slots.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match &*slot {
            Some(made) => Ok(made.clone()),
            None => Ok(slot.insert(make()?).clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_key_is_made_once_and_a_failure_is_tried_again() {
        let (values, made) = (PerKey::default(), AtomicUsize::new(0));
        assert!(values.get_or_make(1, || Err(Error::cuda("no"))).is_err());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let value = values.get_or_make(1, || {
                        std::thread::sleep(Duration::from_millis(5));
                        Ok(made.fetch_add(1, Ordering::Relaxed))
                    });
                    assert_eq!(value.unwrap(), 0);
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn other_keys_do_not_wait() {
        let values = PerKey::default();
        let (done, other) = mpsc::channel();
        std::thread::scope(|scope| {
            let slow = values.get_or_make(1, || {
                // Made by another thread while this one is still at it.
                scope.spawn(|| done.send(values.get_or_make(2, || Ok(20)).unwrap()));
                other.recv_timeout(Duration::from_secs(60)).map_err(|_| Error::cuda("key 2 waits for key 1"))
            });
            assert_eq!(slow.unwrap(), 20);
        });
    }
}
