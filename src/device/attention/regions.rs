//! One plan of device memory: gives offsets and the total, so that no size is computed twice.

/// Regions of one allocation, one behind the other, each 256-byte aligned.
#[derive(Debug, Default)]
pub(super) struct Regions {
    bytes: usize,
}

impl Regions {
    /// Adds a region; its offset.
    pub fn add(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(256);
        at
    }

    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
