//! What the integration tests share.
#![allow(dead_code)]

pub mod cases;
pub mod differing;
pub mod fixtures;
pub mod forward;
pub mod planted;
