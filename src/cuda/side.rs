//! Streams for work that runs beside that of a caller's stream.

use super::device::Device;
use super::stream::Stream;
use crate::error::Result;
use std::sync::{Arc, Mutex, PoisonError};

/// Streams beside those that ask for one. Only one caller holds a side stream at a time: a capture draws it in until it ends, and would
/// take what another thread puts on it.
#[derive(Debug, Default)]
pub(crate) struct SideStreams {
    /// Each with the stream that it was given to last.
    known: Mutex<Vec<(Stream, usize)>>,
}

impl SideStreams {
    /// A stream beside `stream`, nobody else's until it is dropped: the same one as before, where that is free. Work is ordered by
    /// `Stream::wait_for`, before and after.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn beside(&self, stream: &Stream, device: &Device) -> Result<Stream> {
        let (caller, capturing) = (stream.address(), stream.is_capturing()?);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = None;
        for (index, (side, last)) in known.iter().enumerate() {
            // Clones are made under the lock alone.
            if Arc::strong_count(&side.inner) > 1 {
                continue;
            }
            match side.is_capturing()? {
                busy if busy == capturing && *last == caller => return Ok(side.clone()),
                false => free = Some(index),
                true => {}
            }
        }
        if let Some(index) = free {
            known[index].1 = caller;
            return Ok(known[index].0.clone());
        }
        let side = device.stream()?;
        known.push((side.clone(), caller));
        Ok(side)
    }
}
