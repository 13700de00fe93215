//! What runs on the GPU, above the driver: scales from weights, policies and attention, all in device memory.
//!
//! - [`scale`] turns weights into operand descales and certified logit bounds, a whole model at a time.
//! - [`bounds`] is that stage for weights in host memory.
//! - [`policy`] turns bounds and statistics into plans, with the bits of [`crate::policy`].
//! - [`attention`] is the fused E4M3 attention of Hopper.
//!
//! Everything here launches on the caller's stream and, once set up, neither allocates nor synchronises unless its
//! documentation says so. The driver itself is [`crate::cuda`]'s.

pub mod attention;
pub mod bounds;
pub mod policy;
pub mod scale;
#[cfg(test)]
mod tests;

pub use bounds::{DeviceBounds, scale_engine};
