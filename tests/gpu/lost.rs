//! A device that is lost gives errors, and the process goes on.

use crate::weights::{Case, Layer};
use sigmascale::cuda::{Arg, Device, DevicePtr, Launch, Source};
use sigmascale::device::policy::{BoundSource, PolicyEngine};
use sigmascale::device::scale::ScaleEngine;
use sigmascale::policy::PolicyKind;
use std::process::Command;

tests![a_lost_device_gives_errors_and_the_process_goes_on];

/// Set for the child that loses its device.
pub const LOSE: &str = "SIGMASCALE_TEST_LOSE_DEVICE";

const FAULT: Source =
    Source { name: "fault", text: "extern \"C\" __global__ void fault(float* p) { p[threadIdx.x] = 1.f; }" };

fn a_lost_device_gives_errors_and_the_process_goes_on() {
    // A lost context cannot be had back in its process: a child loses its own.
    let child = Command::new(std::env::current_exe().unwrap()).env(LOSE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("the process goes on"), "{:?}: {said}", child.status);
    // Ours is as it was.
    assert!(crate::device().synchronize().is_ok());
}

/// The child's part: everything after the fault must be an error that says so, and nothing may panic.
pub fn lose() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let case = Case::new("lost", (512, 128), (4, 2));
    let layer = Layer::new(&case, 1);
    // SAFETY: `layer` holds the memory.
    let engine = unsafe { ScaleEngine::new(&device, &[layer.input], true) }.unwrap();
    let spec = case.spec();
    let tail = Default::default();
    let plan = PolicyEngine::new(&device, &spec, PolicyKind::DelayedTe.into(), &tail, BoundSource::None).unwrap();
    engine.plan(&stream).unwrap();
    let fault = device.module(FAULT, &[]).unwrap().kernel("fault").unwrap();
    // SAFETY: none: this address is not ours, which is the point.
    unsafe { fault.launch(&stream, Launch::linear(1, 32, 0), &[Arg::Ptr(DevicePtr(1 << 50))]) }.unwrap();
    let first = stream.synchronize().unwrap_err();
    assert!(first.is_cuda() && first.to_string().contains("the device context is lost"), "{first}");
    let later = [
        engine.plan(&stream).err(),
        engine.head_descales().read().err(),
        plan.refresh(&stream).err(),
        plan.save().err(),
        device.allocate::<u8>(16).err(),
        device.synchronize().err(),
        stream.capture(|s| engine.plan(s)).err(),
        PolicyEngine::new(&device, &spec, PolicyKind::DelayedTe.into(), &tail, BoundSource::None).err(),
        Device::open(0).and_then(|d| d.allocate::<u8>(16)).err(),
    ];
    for (i, error) in later.iter().enumerate() {
        assert!(error.as_ref().is_some_and(sigmascale::Error::is_cuda), "call {i} after the loss: {error:?}");
    }
    drop((engine, plan));
    // The CPU engine needs no device.
    assert!(layer.truth().heads[0].exact.is_some());
    println!("the process goes on");
}
