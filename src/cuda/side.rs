//! Streams for work that runs beside that of a caller's stream.

use super::device::Device;
use super::stream::Stream;
use crate::error::Result;
use std::sync::{Mutex, PoisonError};

/// A stream beside each stream that asks for one. A capture draws the side stream in until it ends, so that one capture's is never
/// another caller's.
#[derive(Debug, Default)]
pub(crate) struct SideStreams {
    /// Each with the stream that it was given to last.
    known: Mutex<Vec<(Stream, usize)>>,
}

impl SideStreams {
    /// A stream beside `stream`: the same one as before, where it has one. Work is ordered by `Stream::wait_for`, before and after.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn beside(&self, stream: &Stream, device: &Device) -> Result<Stream> {
        let (caller, capturing) = (stream.address(), stream.is_capturing()?);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = None;
        for (index, (side, last)) in known.iter().enumerate() {
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
