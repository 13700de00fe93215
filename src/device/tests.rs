//! Kernel variants compile for every architecture they claim, without spills and without serialized wgmma. Needs NVRTC
//! and no GPU; without NVRTC each variant is reported as ignored, with the reason.
//!
//! All of them take ten minutes and more, so a test run compiles a sample: one of each source, and one in `ONE_IN` of the
//! rest. `SIGMASCALE_VARIANTS` is the text that decides which (the kernels' sources where it is not set), or `all`.

use super::attention::{attention_variants, backward_variants, cast_variants, paged_variants, spilling_variants};
use crate::cuda::{self, Arch, Request, sources};
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Head dimensions that are offered, of those between two.
fn sizes(from: u32, to: u32) -> impl Iterator<Item = u32> {
    (from..=to).step_by(8)
}

/// Variants that the engines ask for, with the architectures their sources allow: every head dimension of the kernels whose registers
/// hang on it, and samples of what else they are compiled for.
fn variants() -> Vec<Request> {
    let mut all = Vec::new();
    for source in sources::ALL.iter().copied().filter(|s| s.name.starts_with("scale") || s.name.starts_with("policy/"))
    {
        if source == sources::GRAMS_ROUNDED {
            let request = |r, f16| Request::new(source, Arch::SM90A).define("D_HEAD", r).define("WEIGHTS", f16);
            all.extend([(128, 0), (96, 1), (72, 0)].map(|(r, f16)| request(r, f16)));
            continue;
        }
        if source == sources::GRAMS_SPLIT {
            let one = |(r, along, f16, sums): (u32, u32, u32, u32)| {
                let request = Request::new(source, Arch::SM90A).define("D_HEAD", r).define("WEIGHTS", f16);
                request.define("ALONG_CHANNELS", along).define("SUMS", sums)
            };
            let shapes = [
                (64, 0, 0, 0),
                (64, 0, 0, 1),
                (64, 1, 0, 1),
                (128, 0, 0, 1),
                (128, 1, 0, 0),
                (80, 1, 1, 0),
                (16, 0, 1, 0),
            ];
            all.extend(shapes.map(one));
            continue;
        }
        if source == sources::NORMS {
            // Channels of a head, [in, out], a mean or a shift, rotation, f16, type of the vectors, beside other kernels.
            for shape in [
                [64, 0, 1, 0, 0, 2, 0],
                [64, 1, 1, 0, 0, 2, 0],
                [64, 1, 1, 1, 1, 1, 0],
                [128, 0, 0, 1, 0, 0, 0],
                [128, 0, 1, 1, 1, 1, 0],
                [16, 0, 0, 0, 0, 0, 0],
                [16, 1, 1, 1, 0, 2, 0],
                [80, 1, 1, 1, 0, 2, 0],
                [24, 0, 1, 1, 0, 2, 0],
                [192, 0, 0, 1, 0, 0, 0],
                [192, 0, 1, 0, 0, 0, 0],
                [248, 1, 1, 0, 0, 1, 0],
                [256, 0, 1, 1, 0, 2, 0],
                [256, 1, 0, 1, 1, 1, 0],
                [64, 1, 0, 0, 0, 2, 1],
                [128, 0, 0, 0, 1, 0, 1],
            ]
            .into_iter()
            .chain(sizes(16, 256).flat_map(|r| [[r, 0, 1, 1, 0, 0, 0], [r, 0, 0, 0, 0, 2, 1]]))
            {
                let names = ["D_HEAD", "ALONG_CHANNELS", "SUMS", "TURNS", "F16", "VECTORS", "BESIDE"];
                let request = Request::new(source, Arch::SM90A);
                all.push(
                    names.into_iter().zip(shape).fold(request, |request, (name, value)| request.define(name, value)),
                );
            }
            // Several blocks per head, or fewer per multiprocessor than fit.
            for (r, sums) in [(128, 0), (128, 1), (136, 0), (192, 1), (256, 0), (256, 1)] {
                for (name, value) in [("SPLIT", 2), ("SPLIT", 4), ("SPLIT", 8), ("AT_MOST", 2), ("AT_MOST", 3)] {
                    let request = Request::new(source, Arch::SM90A).define("D_HEAD", r).define("SUMS", sums);
                    all.push(request.define("TURNS", 1).define(name, value));
                }
            }
            all.push(Request::new(source, Arch::SM90A).define("D_HEAD", 64).define("SUMS", 1).define("AT_MOST", 4));
            continue;
        }
        if source == sources::GRAMS_WIDE {
            let wide = [(160, 1), (192, 2), (200, 2), (256, 1), (256, 2)];
            let f32s = [(16, 2), (40, 2), (64, 2), (96, 2), (128, 2)];
            for (r, weights) in wide.into_iter().chain(f32s).chain(sizes(136, 256).map(|r| (r, 0))) {
                all.push(Request::new(source, Arch::SM90A).define("D_HEAD", r).define("WEIGHTS", weights));
            }
            continue;
        }
        if source == sources::EIGENVALUES {
            all.extend(sizes(16, 256).map(|r| Request::new(source, Arch::SM90A).define("D_HEAD", r)));
            for (arch, r) in [(Arch::SM80, 64), (Arch::SM89, 128), (Arch::SM100, 128)] {
                all.push(Request::new(source, arch).define("D_HEAD", r));
            }
            continue;
        }
        if source == sources::PRODUCTS {
            let one = |arch, r, chunk| Request::new(source, arch).define("D_HEAD", r).define("CHUNK", chunk);
            all.extend(sizes(16, 184).map(|r| one(Arch::SM90A, r, r.next_multiple_of(16))));
            all.extend(sizes(192, 256).map(|r| one(Arch::SM90A, r, if r < 224 { 128 } else { 64 })));
            for (arch, r, chunk) in
                [(Arch::SM80, 64, 64), (Arch::SM80, 256, 16), (Arch::SM89, 128, 64), (Arch::SM100, 128, 128)]
            {
                all.push(one(arch, r, chunk));
            }
            continue;
        }
        if source == sources::POWER {
            for (arch, r, weights, rows) in [
                (Arch::SM90A, 16, 0, 1),
                (Arch::SM90A, 64, 1, 1),
                (Arch::SM90A, 96, 0, 0),
                (Arch::SM90A, 128, 0, 1),
                (Arch::SM90A, 128, 2, 1),
                (Arch::SM90A, 256, 0, 1),
                (Arch::SM90A, 256, 2, 0),
                (Arch::SM80, 128, 0, 1),
                (Arch::SM89, 248, 2, 1),
                (Arch::SM100, 128, 0, 0),
            ] {
                let request = Request::new(source, arch).define("D_HEAD", r);
                all.push(request.define("WEIGHTS", weights).define("ROWS", rows).define("MEAN", 1));
            }
            continue;
        }
        // mul.rn.bf16x2 in the shared header asks for sm_90 where it is used, which these sources do not.
        for arch in [Arch::SM80, Arch::SM89, Arch::SM90A, Arch::SM100] {
            all.push(Request::new(source, arch));
        }
    }
    all.extend(attention_variants());
    all.extend(cast_variants());
    all.extend(paged_variants());
    all.extend(backward_variants());
    all
}

fn label(request: &Request) -> String {
    let defines: Vec<String> = request.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{} {} {}", request.source.name, request.arch, defines.join(" "))
}

/// nvdisasm of the Python environment that NVRTC comes from, or of a toolkit.
fn disassembler() -> Option<PathBuf> {
    let wheels = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().flat_map(|root| {
        let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
        pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvdisasm")).collect::<Vec<_>>()
    });
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|root| root.join("bin/nvdisasm"));
    wheels.chain(toolkits).find(|path| path.exists())
}

fn disassembly(program: &Path, cubin: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), cubin).unwrap();
    let output = Command::new(program).arg("-c").arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_list_of_attention_variants_stays_short() {
    let all = attention_variants();
    assert!((1..=160).contains(&all.len()), "{}", all.len());
}

/// How many variants stand for one that a sample compiles.
const ONE_IN: u64 = 24;

/// What `choice` compiles of `all`: everything, or a sample that the text decides. Every source is in a sample, so that
/// one that no longer compiles is found whatever the text is.
fn sample(mut all: Vec<(Request, u32)>, choice: &str) -> Vec<(Request, u32)> {
    if choice == "all" {
        return all;
    }
    let drawn = |request: &Request| {
        let mut hasher = DefaultHasher::new();
        (choice, label(request)).hash(&mut hasher);
        hasher.finish()
    };
    all.sort_by_cached_key(|(request, _)| drawn(request));
    let mut seen = HashSet::new();
    all.retain(|(request, _)| seen.insert(request.source.name) || drawn(request) % ONE_IN == 0);
    all
}

#[test]
fn a_sample_has_every_source_and_its_text_decides_the_rest() {
    let all: Vec<(Request, u32)> = variants().into_iter().map(|request| (request, 0)).collect();
    let labels = |choice: &str| -> HashSet<String> {
        sample(all.clone(), choice).iter().map(|(request, _)| label(request)).collect()
    };
    let sources = |of: &HashSet<String>| -> HashSet<String> {
        of.iter().map(|label| label.split(' ').next().unwrap().to_owned()).collect()
    };
    let (every, first, second) = (labels("all"), labels("first"), labels("second"));
    assert_eq!(every.len(), all.iter().map(|(request, _)| label(request)).collect::<HashSet<_>>().len());
    assert_eq!(first, labels("first"));
    assert_ne!(first, second);
    for of in [&first, &second] {
        assert_eq!(sources(of), sources(&every));
        assert!(of.len() < every.len() / 3, "{} of {}", of.len(), every.len());
    }
    // A thousand texts reach every variant.
    let mut left = every;
    for text in 0..1000 {
        let reached = labels(&text.to_string());
        left.retain(|label| !reached.contains(label));
    }
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn variants_compile_clean() {
    let choice = std::env::var("SIGMASCALE_VARIANTS").unwrap_or_else(|_| {
        let texts = sources::ALL.iter().map(|source| source.text);
        texts.chain(sources::HEADERS.iter().map(|(_, text)| *text)).collect()
    });
    let variants: Vec<(Request, u32)> =
        variants().into_iter().map(|variant| (variant, 0)).chain(spilling_variants()).collect();
    let count = variants.len();
    let variants = sample(variants, &choice);
    println!("{} of {count} variants", variants.len());
    if let Err(reason) = cuda::compiler_version() {
        for (variant, _) in &variants {
            println!("ignored: {}: {reason}", label(variant));
        }
        return;
    }
    let disassembler = disassembler();
    if disassembler.is_none() {
        println!("ignored: instructions: nvdisasm was not found beside NVRTC");
    }
    let complaints: Vec<String> = variants
        .par_iter()
        .flat_map_iter(|(variant, spills)| complaints(variant, *spills, disassembler.as_deref()))
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// Instructions that a kernel must not be without.
fn instructions(variant: &Request) -> &'static [&'static str] {
    /// Whose plain loads read what the copy engine brings: the next copy waits for these only behind a fence.
    const READERS: [sources::Source; 3] = [sources::NORMS, sources::GRAMS_ROUNDED, sources::GRAMS_WIDE];
    match variant.source {
        // Products on tensor cores in FP8, copies by the copy engine.
        source if [sources::ATTENTION, sources::PAGED].contains(&source) => &["QGMMA", "UTMALDG"],
        source if READERS.contains(&source) => &["UTMALDG", "FENCE.VIEW.ASYNC"],
        _ => &[],
    }
}

/// Innermost loops with products on tensor cores whose descriptors come from vector registers (`R2UR`): there the assembler does not
/// know that the warps of the loop stay together, and every product waits for moves.
fn divergent_mainloops(text: &str) -> usize {
    /// Waits whose slow path lies at the end of a kernel look like loops over all that is between.
    const LONGEST: usize = 1500;
    /// Masked loops of windows have one. A loop that is not uniform has eight and more: every descriptor of its products.
    const FEW: usize = 1;
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let labels: HashMap<&str, usize> =
        lines.iter().enumerate().filter_map(|(i, line)| Some((line.strip_suffix(':')?, i))).collect();
    // From the label that a branch goes back to.
    let first =
        |line: &str| labels.get(line.split_once("BRA")?.1.split('`').nth(1)?.split(['(', ')']).nth(1)?).copied();
    let loops: Vec<(usize, usize)> = lines
        .iter()
        .enumerate()
        .filter_map(|(i, line)| Some((first(line)?, i)))
        .filter(|(from, to)| from < to && to - from < LONGEST)
        .collect();
    let count =
        |(from, to): (usize, usize), word: &str| lines[from..to].iter().filter(|line| line.contains(word)).count();
    let innermost =
        |&(from, to): &(usize, usize)| !loops.iter().any(|&(a, b)| (a, b) != (from, to) && from <= a && b <= to);
    loops.iter().filter(|l| innermost(l) && count(**l, "GMMA") > 0 && count(**l, "R2UR") > FEW).count()
}

/// What is wrong with one variant, which may spill so many bytes.
fn complaints(variant: &Request, spills: u32, disassembler: Option<&Path>) -> Vec<String> {
    let name = label(variant);
    let compiled = match cuda::compile(variant) {
        Ok(compiled) => compiled,
        Err(e) => return vec![format!("{name}: {e}")],
    };
    let mut complaints = Vec::new();
    let resources = compiled.resources();
    if resources.is_empty() {
        complaints.push(format!("{name}: the log names no kernel\n{}", compiled.log));
    }
    let spilling = resources.iter().filter(|kernel| kernel.spills > spills);
    complaints.extend(spilling.map(|kernel| format!("{name}: {} spills {} bytes", kernel.kernel, kernel.spills)));
    // C7519 tells of a fence in a loop of products and is none of those by which they wait for each other.
    let serialised = |line: &str| line.contains("(C75") && !line.contains("(C7519)");
    // The compiler's own routine for quotients of subnormal numbers, which saves its caller's registers.
    let subnormal = |line: &str| line.contains("_slowpath'");
    let allowed = |line: &str| spills > 0 && line.contains("Registers are spilled");
    let warnings = compiled
        .log
        .lines()
        .filter(|line| serialised(line) || line.contains("warning") && !(subnormal(line) || allowed(line)));
    complaints.extend(warnings.map(|line| format!("{name}: {line}")));
    let expected = instructions(variant);
    if let Some(disassembler) = disassembler.filter(|_| !expected.is_empty()) {
        let text = disassembly(disassembler, &compiled.cubin);
        let missing = expected.iter().filter(|instruction| !text.contains(**instruction));
        complaints.extend(missing.map(|instruction| format!("{name}: no {instruction} in the disassembly")));
        let divergent = divergent_mainloops(&text);
        if divergent > 0 {
            complaints.push(format!("{name}: {divergent} mainloops that are not uniform"));
        }
    }
    // Same options, same bytes: what the cache relies on.
    if variant.source == sources::GAINS {
        assert_eq!(cuda::compile(variant).unwrap().cubin, compiled.cubin, "{name}");
    }
    complaints
}

#[test]
fn the_build_of_the_compiler_is_known() {
    match cuda::compiler_build() {
        Ok(build) => {
            let (major, minor) = cuda::compiler_version().unwrap();
            assert!(build.contains(&format!("release {major}.{minor}, V{major}.{minor}.")), "{build}");
        }
        Err(e) => println!("ignored: the_build_of_the_compiler_is_known: {e}"),
    }
}

#[test]
fn a_broken_source_gives_the_log() {
    if let Err(reason) = cuda::compiler_version() {
        println!("ignored: a_broken_source_gives_the_log: {reason}");
        return;
    }
    let source = sources::Source { name: "broken", text: "__global__ void k() { undeclared = 1; }" };
    let error = cuda::compile(&Request::new(source, Arch::SM90A)).unwrap_err();
    assert!(error.is_cuda() && error.to_string().contains("undeclared"), "{error}");
}
