//! Every kernel variant compiles for every architecture it claims, without spills and without serialised wgmma. Needs
//! NVRTC and no GPU; without NVRTC each variant is reported as ignored, with the reason.

use sigmascale::cuda::{self, Arch, Request, sources};

/// Every variant that the engines ask for, with the architectures its source allows.
fn variants() -> Vec<Request> {
    let mut all = Vec::new();
    for source in sources::ALL.iter().copied().filter(|s| s.name.starts_with("scale_")) {
        if source == sources::GRAMS_WGMMA {
            for (r, along, f16) in
                [(64, 0, 0), (128, 0, 0), (64, 1, 0), (128, 1, 0), (96, 0, 1), (80, 1, 1), (16, 0, 0)]
            {
                let request = Request::new(source, Arch::SM90A).define("D_HEAD", r);
                all.push(request.define("ALONG_CHANNELS", along).define("F16", f16));
            }
            continue;
        }
        if source == sources::BOUNDS {
            for (arch, sizes) in [
                (Arch::SM80, &[64][..]),
                (Arch::SM89, &[128]),
                (Arch::SM90A, &[16, 64, 96, 128, 192, 256]),
                (Arch::SM100, &[128]),
            ] {
                all.extend(sizes.iter().map(|r| Request::new(source, arch).define("D_HEAD", r)));
            }
            continue;
        }
        if source == sources::POWER {
            all.extend(
                [Arch::SM80, Arch::SM89, Arch::SM90A, Arch::SM100]
                    .into_iter()
                    .flat_map(|arch| [64, 128].map(|r| Request::new(source, arch).define("D_HEAD", r))),
            );
            continue;
        }
        // mul.rn.bf16x2 in the shared header asks for sm_90 where it is used, which these sources do not.
        for arch in [Arch::SM80, Arch::SM89, Arch::SM90A, Arch::SM100] {
            all.push(Request::new(source, arch));
        }
    }
    all.extend(attention_variants());
    all
}

/// The attention's tile configurations (d_head, keys a tile, consumer warpgroups, stages) and the cast's inputs.
fn attention_variants() -> Vec<Request> {
    let mut all = Vec::new();
    for (d, n, consumers, stages) in [(128, 128, 2, 4), (128, 192, 2, 2), (64, 128, 3, 4), (64, 128, 2, 4)] {
        for (causal, telemetry, logits) in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1)] {
            let request = Request::new(sources::ATTENTION, Arch::SM90A).define("HEAD_DIM", d).define("BLOCK_N", n);
            let request = request.define("CONSUMERS", consumers).define("K_STAGES", stages).define("V_STAGES", stages);
            let request = request.define("CAUSAL", causal).define("TELEMETRY", telemetry);
            all.push(request.define("LOGITS_E4M3", logits));
        }
    }
    for d in [64, 128] {
        for (input, rope) in [(0, 0), (0, 1), (0, 2), (1, 1), (2, 1)] {
            let request = Request::new(sources::CAST, Arch::SM90A).define("HEAD_DIM", d).define("INPUT", input);
            all.push(request.define("ROPE", rope).define("STATS", 1));
        }
    }
    all
}

fn label(request: &Request) -> String {
    let defines: Vec<String> = request.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{} {} {}", request.source.name, request.arch, defines.join(" "))
}

#[test]
fn every_variant_compiles_clean() {
    let variants = variants();
    if !cuda::is_compiler_available() {
        let reason = cuda::compiler_version().unwrap_err();
        for variant in &variants {
            println!("ignored: {}: {reason}", label(variant));
        }
        return;
    }
    let mut complaints = Vec::new();
    for variant in &variants {
        let name = label(variant);
        match cuda::compile(variant) {
            Err(e) => complaints.push(format!("{name}: {e}")),
            Ok(compiled) => {
                let resources = compiled.resources();
                if resources.is_empty() {
                    complaints.push(format!("{name}: the log names no kernel\n{}", compiled.log));
                }
                for kernel in &resources {
                    println!("{name}: {} uses {} registers", kernel.kernel, kernel.registers);
                    if kernel.spills > 0 {
                        complaints.push(format!("{name}: {} spills {} bytes", kernel.kernel, kernel.spills));
                    }
                }
                complaints.extend(
                    compiled
                        .log
                        .lines()
                        .filter(|line| line.contains("(C75") || line.contains("warning"))
                        .map(|line| format!("{name}: {line}")),
                );
                // Same options, same bytes: what the cache relies on.
                if variant.source == sources::GAINS {
                    assert_eq!(cuda::compile(variant).unwrap().cubin, compiled.cubin, "{name}");
                }
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn a_broken_source_gives_the_log() {
    if !cuda::is_compiler_available() {
        println!("ignored: a_broken_source_gives_the_log: {}", cuda::compiler_version().unwrap_err());
        return;
    }
    let source = sources::Source { name: "broken", text: "__global__ void k() { undeclared = 1; }" };
    let error = cuda::compile(&Request::new(source, Arch::SM90A)).unwrap_err();
    assert!(error.is_cuda() && error.to_string().contains("undeclared"), "{error}");
}
