//! The layer order of ARCHITECTURE.md, enforced: a module of the library uses only modules of lower layers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Layers from the bottom; modules that do not exist yet keep their place.
const LAYERS: &[&[&str]] = &[
    &["error", "file", "fp8", "tensor"],
    &["scale", "cuda"],
    &["model"],
    &["geometry", "forward"],
    &["spectral"],
    &["bound"],
    &["plan", "stats"],
    &["policy", "attention"],
    &["runtime", "device_plan"],
    &["calibrate", "stress"],
    &["train"],
];

/// Items that `lib.rs` re-exports, and where they live.
const ROOT_ITEMS: &[(&str, &str)] =
    &[("Error", "error"), ("Result", "error"), ("Descale", "scale"), ("QuantScale", "scale")];

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Code without comments and without its test module.
fn code(source: &str) -> String {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    source
        .lines()
        .map(|line| if line.trim_start().starts_with("//") { "" } else { line.split(" // ").next().unwrap_or("") })
        .collect::<Vec<_>>()
        .join("\n")
}

/// First names behind every `crate::`, `use crate::{a, b}` included.
fn used(code: &str) -> Vec<String> {
    let name =
        |text: &str| -> String { text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut names = Vec::new();
    for (place, _) in code.match_indices("crate::") {
        // `$crate::` of a macro counts too; `my_crate::` does not.
        if code[..place].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = code[place + "crate::".len()..].trim_start();
        let Some(group) = rest.strip_prefix('{') else {
            names.push(name(rest));
            continue;
        };
        let mut depth = 0;
        let mut start = true;
        for (at, c) in group.char_indices() {
            if start && !c.is_whitespace() {
                names.push(name(&group[at..]));
                start = false;
            }
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                _ => {}
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Every broken rule of one file of `module`; `depth` is 1 for the module's own file, 2 for a submodule's, and so on.
fn violations(module: &str, depth: usize, source: &str) -> Vec<String> {
    let code = code(source);
    let Some(layer) = layer_of(module) else {
        return vec![format!("module `{module}` has no layer: add it to ARCHITECTURE.md and to this test")];
    };
    let mut broken = Vec::new();
    for name in used(&code) {
        let target = ROOT_ITEMS.iter().find(|(item, _)| *item == name).map_or(name.as_str(), |(_, module)| module);
        if target == "error" || target == module {
            continue;
        }
        match layer_of(target) {
            Some(other) if other < layer => {}
            Some(other) => broken.push(format!("`{module}` (layer {layer}) uses `{target}` (layer {other})")),
            None => broken.push(format!("`{module}` uses `{name}`, which has no layer")),
        }
    }
    // Ways around `crate::`: as many `super` as the file is deep; an indented line may stand in a module of its own.
    let climbs = |line: &str| {
        let allowed = if line.starts_with(char::is_whitespace) { depth + 1 } else { depth };
        line.contains(&"super::".repeat(allowed))
    };
    broken
        .extend(code.lines().filter(|line| climbs(line)).map(|line| format!("`{module}` climbs out: {}", line.trim())));
    broken
}

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn modules_use_only_lower_layers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut broken = Vec::new();
    for file in &files {
        let inside = file.strip_prefix(&root).unwrap();
        let parts: Vec<&str> = inside.iter().map(|part| part.to_str().unwrap()).collect();
        let module = parts[0].trim_end_matches(".rs");
        // Faces stand outside the library's layers.
        if ["lib", "main", "cli", "capi"].contains(&module) {
            continue;
        }
        let depth = if parts.last() == Some(&"mod.rs") { parts.len() - 1 } else { parts.len() };
        let source = std::fs::read_to_string(file).unwrap();
        broken
            .extend(violations(module, depth, &source).into_iter().map(|rule| format!("{}: {rule}", inside.display())));
    }
    assert!(files.len() > 10 && broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_table_is_that_of_the_architecture() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).unwrap();
    let mut table: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if let (true, Some(Ok(layer))) = (line.starts_with('|'), cells.first().map(|cell| cell.parse::<usize>())) {
            table.entry(layer).or_default().extend(cells[1].split(',').map(|m| m.trim().trim_matches('`').to_owned()));
        }
    }
    assert_eq!(table.keys().copied().collect::<Vec<_>>(), (0..LAYERS.len()).collect::<Vec<_>>());
    for (layer, modules) in table {
        let (mut written, mut enforced) = (modules, LAYERS[layer].to_vec());
        written.sort_unstable();
        enforced.sort_unstable();
        assert_eq!(written, enforced, "layer {layer}");
    }
}

#[test]
fn planted_violations_are_found() {
    let found = |module: &str, source: &str| violations(module, 1, source).len();
    assert_eq!(found("policy", "use crate::attention::Cpu;"), 1, "same layer");
    assert_eq!(found("bound", "use crate::plan::ScalePlan;"), 1, "higher layer");
    assert_eq!(found("bound", "fn f(x: &crate::plan::ScalePlan) {}"), 1, "inline path");
    assert_eq!(found("bound", "use crate::{error::Error, plan::{A, B}, spectral::C};"), 1, "group");
    assert_eq!(found("bound", "use crate::{\n    plan::A,\n    runtime::B,\n};"), 2, "group over lines");
    assert_eq!(found("tensor", "use crate::Descale;"), 1, "root item");
    assert_eq!(found("bound", "use crate::nowhere::A;"), 1, "unknown module");
    assert_eq!(found("nowhere", ""), 1, "module without a layer");
    assert_eq!(found("bound", "use super::plan::ScalePlan;"), 1, "around crate");
    assert_eq!(violations("bound", 2, "use super::super::plan::A;").len(), 1, "around crate, deeper");
    assert!(violations("cuda", 3, "use super::super::device::Device;").is_empty(), "inside the module");
}

#[test]
fn what_is_allowed_passes() {
    let source = "//! See [`crate::plan`].\nuse crate::error::Result;\nuse crate::{Error, spectral::A, bound::tail};\n\
                  // crate::runtime\n#[cfg(test)]\nmod tests {\n    use crate::plan::B;\n}\n";
    assert_eq!(violations("bound", 1, source), Vec::<String>::new());
}
