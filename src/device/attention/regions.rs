//! One plan of device memory: gives offsets and the total, so that no size is computed twice.

use crate::cuda::{Element, View};
use crate::error::{Error, Result};

/// Consecutive regions of one allocation, each 256-byte aligned.
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

/// Checks a caller's workspace against the bytes that a call needs.
///
/// # Errors
/// `is_argument` if it is too small, has gaps, or is not 256-byte aligned.
pub(super) fn check_workspace(workspace: &View<1>, needed: usize) -> Result<()> {
    let [have] = workspace.extents();
    if have < needed {
        return Err(Error::argument(format_args!("the workspace has {have} bytes where the call needs {needed}")));
    }
    workspace.expect_dense("workspace", Element::U8, [have])?;
    workspace.expect_aligned("workspace", 256, 1)
}
