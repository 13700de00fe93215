//! The scale engine against the CPU engine.

use crate::device;

tests![a_device_opens];

fn a_device_opens() {
    assert!(device().processors() > 0);
}
