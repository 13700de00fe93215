//! The native half of the Python package `sigmascale`; private, see the package for what users call.
//!
//! Results that the command line prints as JSON cross as JSON text. The interpreter lock is released around work.

mod attention;
mod call;
mod cpu_attention;
mod cpu_scales;
mod device;
mod diagnose;
mod errors;
mod mla;
mod offline;
mod policy;
mod serving;
mod threads;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(offline::command, module)?)?;
    module.add_function(wrap_pyfunction!(offline::config_text, module)?)?;
    module.add_function(wrap_pyfunction!(offline::calibrate, module)?)?;
    module.add_function(wrap_pyfunction!(offline::inspect, module)?)?;
    module.add_function(wrap_pyfunction!(offline::stress, module)?)?;
    module.add_function(wrap_pyfunction!(diagnose::diagnose, module)?)?;
    module.add_class::<diagnose::Alarms>()?;
    module.add_function(wrap_pyfunction!(offline::layout, module)?)?;
    module.add_function(wrap_pyfunction!(offline::presets, module)?)?;
    module.add_function(wrap_pyfunction!(serving::export, module)?)?;
    module.add_function(wrap_pyfunction!(serving::verify, module)?)?;
    module.add_function(wrap_pyfunction!(serving::centers, module)?)?;
    module.add_function(wrap_pyfunction!(serving::center_hash, module)?)?;
    module.add_function(wrap_pyfunction!(serving::refit, module)?)?;
    module.add_class::<serving::ScaleStream>()?;
    module.add_function(wrap_pyfunction!(device::gpu, module)?)?;
    module.add_function(wrap_pyfunction!(policy::policy, module)?)?;
    module.add_function(wrap_pyfunction!(policy::defaults, module)?)?;
    module.add_function(wrap_pyfunction!(policy::attention_spec, module)?)?;
    module.add_class::<attention::Attention>()?;
    module.add_function(wrap_pyfunction!(cpu_scales::host_scales, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_attention::host_forward, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_attention::host_backward, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_scales::host_estimates, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_scales::certified_inflation, module)?)?;
    module.add_class::<cpu_scales::HostPolicy>()?;
    module.add_class::<device::ScaleEngine>()?;
    module.add_class::<device::ShapeEngine>()?;
    module.add_class::<device::EstimateEngine>()?;
    module.add_class::<mla::MlaEngine>()?;
    module.add_class::<mla::MlaModel>()?;
    module.add_class::<policy::DevicePolicy>()
}
