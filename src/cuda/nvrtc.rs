//! Compiling kernels at run time: source text with our own headers to a cubin, with the compiler's full log.

use super::library::{self, compiler_library};
use super::sources::{self, Source};
use crate::error::{Error, Result};
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::OnceLock;

/// A GPU architecture that code is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Compute capability, major * 10 + minor.
    pub compute: u32,
    /// Architecture-specific instructions (`sm_90a`: wgmma).
    pub specific: bool,
}

impl Arch {
    /// Ampere (A100).
    pub const SM80: Self = Self { compute: 80, specific: false };
    /// Ada (L40S, RTX 40).
    pub const SM89: Self = Self { compute: 89, specific: false };
    /// Hopper (H100, H200) with its own instructions.
    pub const SM90A: Self = Self { compute: 90, specific: true };
    /// Blackwell (B200).
    pub const SM100: Self = Self { compute: 100, specific: false };

    /// The architecture to compile for on a device of this compute capability.
    pub fn of(compute: u32) -> Self {
        Self { compute, specific: compute == 90 }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.compute, if self.specific { "a" } else { "" })
    }
}

/// One compilation: a source of this crate, the architecture, and macros.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// What to compile.
    pub source: Source,
    /// For which architecture.
    pub arch: Arch,
    /// Macros, in order.
    pub defines: Vec<(&'static str, String)>,
}

impl Request {
    /// `source` for `arch`, without macros.
    pub fn new(source: Source, arch: Arch) -> Self {
        Self { source, arch, defines: Vec::new() }
    }

    /// Adds a macro.
    pub fn define(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// The compiler's options.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", self.arch),
            "--std=c++17".into(),
            "--ptxas-options=-v".into(),
            "--ptxas-options=--warn-on-spills".into(),
        ];
        options.extend(self.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }
}

/// A compiled source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// Everything that the compiler and the assembler said.
    pub log: String,
}

/// Registers and memory of one kernel, as the assembler reported them.
#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceUse {
    /// Entry point.
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of the stack frame a thread.
    pub stack: u32,
    /// Bytes stored and loaded by spills, a thread.
    pub spills: u32,
}

#[cfg(test)]
impl Compiled {
    /// Resources of every kernel in the log.
    pub fn resources(&self) -> Vec<ResourceUse> {
        let mut all: Vec<ResourceUse> = Vec::new();
        for line in self.log.lines() {
            if let Some(rest) = line.split_once("Compiling entry function '").map(|p| p.1) {
                all.push(ResourceUse { kernel: rest.split('\'').next().unwrap_or("").into(), ..Default::default() });
            }
            let Some(last) = all.last_mut() else { continue };
            for part in line.split(',') {
                let number = || part.split_whitespace().find_map(|w| w.parse::<u32>().ok()).unwrap_or(0);
                if part.contains("bytes stack frame") {
                    last.stack = number();
                } else if part.contains("bytes spill stores") || part.contains("bytes spill loads") {
                    last.spills += number();
                } else if part.contains("registers") && part.contains("Used") {
                    last.registers = number();
                }
            }
        }
        all
    }
}

/// NVRTC's version (major, minor).
///
/// # Errors
/// If NVRTC is not found.
pub fn compiler_version() -> Result<(i32, i32)> {
    compiler_library().map_err(Error::cuda)?;
    library::loaded_version().map_err(Error::cuda)
}

/// The build of NVRTC, such as "CL-36424714 release 13.0, V13.0.88": versions with the same numbers can compile differently.
/// Asked for once a process.
///
/// # Errors
/// If NVRTC is not found.
pub fn compiler_build() -> Result<&'static str> {
    static BUILD: OnceLock<Result<String, String>> = OnceLock::new();
    super::library::compiler_library().map_err(Error::cuda)?;
    // No function tells it; the head of every PTX does.
    let build = BUILD.get_or_init(|| {
        let program = Program::new(c"", c"version", &[]).map_err(|e| e.to_string())?;
        // SAFETY: the program is live; PTX was made, and the result is NVRTC's text.
        let ptx = unsafe { result::compile_program::<&str>(program.0, &[]).and_then(|()| result::get_ptx(program.0)) };
        let ptx = ptx.map_err(|e| format!("NVRTC does not tell its build: {e}"))?;
        let text: String = ptx.iter().map(|&c| c as u8 as char).collect();
        let tell =
            |mark: &str| text.lines().find_map(|line| line.split_once(mark)).map(|(_, rest)| rest.trim().to_owned());
        match (tell("Compiler Build ID: "), tell("Cuda compilation tools, ")) {
            (Some(id), Some(release)) => Ok(format!("{id} {release}")),
            _ => Err("NVRTC does not tell its build: its PTX has no such comment".to_owned()),
        }
    });
    build.as_deref().map_err(Error::cuda)
}

/// Compiles one source; no cache is used.
///
/// # Errors
/// If NVRTC is not found, or the source does not compile: the message holds the compiler's full log.
pub fn compile(request: &Request) -> Result<Compiled> {
    compiler_library().map_err(Error::cuda)?;
    let name = request.source.name;
    let text = |s: &str| CString::new(s).map_err(|_| Error::cuda(format_args!("{name}: a source holds a zero byte")));
    let (source, file) = (text(request.source.text)?, text(name)?);
    let headers = sources::HEADERS
        .iter()
        .map(|(name, body)| Ok((text(name)?, text(body)?)))
        .collect::<Result<Vec<(CString, CString)>>>()?;
    let program = Program::new(&source, &file, &headers)?;
    // SAFETY: the program is live, and the options are plain strings.
    let done = unsafe { result::compile_program(program.0, &request.options()) };
    // SAFETY: the program is live and a compilation was tried.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    // SAFETY: NVRTC ends its log with a zero byte, inside the buffer that the vector owns.
    let log =
        if log.is_empty() { String::new() } else { unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into() };
    if let Err(e) = done {
        return Err(Error::cuda(format_args!("{name} does not compile for {}: {e}\n{log}", request.arch)));
    }
    Ok(Compiled { cubin: program.cubin(name)?, log })
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &CStr, file: &CStr, headers: &[(CString, CString)]) -> Result<Self> {
        let names: Vec<_> = headers.iter().map(|h| h.0.as_ptr()).collect();
        let bodies: Vec<_> = headers.iter().map(|h| h.1.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in zero and outlive the call, which copies them; both arrays have the given length.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                source.as_ptr(),
                file.as_ptr(),
                headers.len() as i32,
                bodies.as_ptr(),
                names.as_ptr(),
            )
        }
        .result()
        .map_err(|e| Error::cuda(format_args!("NVRTC does not take {}: {e}", file.to_string_lossy())))?;
        Ok(Self(program))
    }

    fn cubin(&self, name: &str) -> Result<Vec<u8>> {
        let fail = |e: result::NvrtcError| Error::cuda(format_args!("{name}: NVRTC made no cubin: {e}"));
        let mut size = 0usize;
        // SAFETY: the program is live and compiled; the pointer is to a live integer.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result().map_err(fail)?;
        if size == 0 {
            return Err(Error::cuda(format_args!("{name}: NVRTC made an empty cubin")));
        }
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }.result().map_err(fail)?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is live and dropped once; a failure leaves nothing to do.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_from_the_log() {
        let log = "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
                   ptxas info    : Function properties for a\n    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 384 bytes smem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
                   ptxas info    : Used 255 registers\n";
        let found = Compiled { cubin: vec![], log: log.into() }.resources();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], ResourceUse { kernel: "a".into(), registers: 40, stack: 16, spills: 20 });
        assert_eq!((found[1].registers, found[1].spills), (255, 0));
    }
}
