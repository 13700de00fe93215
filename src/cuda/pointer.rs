//! Addresses in device memory.

/// An address in device memory. Making one is safe; a kernel that reads through it is what has to be careful.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// No address: an absent vector.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}
