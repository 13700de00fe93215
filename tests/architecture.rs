//! The structure that ARCHITECTURE.md promises, read off the sources: crates use only crates below them and modules only
//! modules of lower layers, no two files import each other in a circle, and the driver and `unsafe` stay where they belong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Item, UseTree, Visibility};

/// Crates from the bottom by their folders, each with its layers from the bottom. A crate uses only crates before it; a
/// module uses only modules of lower layers, but `error` may be used by all.
const CRATES: &[(&str, &str, Layers)] = &[
    (
        "sigmascale",
        ".",
        &[
            &["error", "names"],
            &["file", "fp8", "tensor"],
            &["scale"],
            &["model"],
            &["geometry"],
            &["spectral"],
            &["bound"],
            &["plan", "stats"],
            &["policy", "attention", "serving"],
            &["runtime", "cuda"],
            &["device"],
            &["calibrate"],
        ],
    ),
    ("sigmascale-lab", "lab", &[&["file"], &["history", "forward"], &["diagnose", "stress"], &["train"]]),
    // The command line has no layers.
    ("sigmascale-cli", "cli", &[]),
];

type Layers = &'static [&'static [&'static str]];

/// A module's path from the crate's root; empty for `lib.rs`.
type Module = Vec<String>;

/// What one file declares and refers to, test code left out.
#[derive(Default)]
struct File {
    /// Names that a `use` brings in, and the paths behind them.
    imports: BTreeMap<String, Vec<String>>,
    /// Those of a `pub use`: handing a name on is no import until the file's own code says the name.
    handed_on: BTreeSet<String>,
    /// Modules behind `use path::*`.
    globs: Vec<Vec<String>>,
    /// Every path in code, and every single name.
    mentions: BTreeSet<Vec<String>>,
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| a.path().is_ident("cfg") && a.parse_args::<syn::Path>().is_ok_and(|p| p.is_ident("test")))
}

impl File {
    fn parse(source: &str) -> Self {
        let mut file = Self::default();
        file.visit_file(&syn::parse_file(source).unwrap());
        file
    }

    fn import(&mut self, tree: &UseTree, mut path: Vec<String>, public: bool) {
        match tree {
            UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.import(&step.tree, path, public);
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree, path.clone(), public)),
            UseTree::Glob(_) => self.globs.push(path),
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let local = if name == "self" { path.last().unwrap().clone() } else { name.clone() };
                if name != "self" {
                    path.push(name);
                }
                self.bring(local, path, public);
            }
            UseTree::Rename(renamed) => {
                path.push(renamed.ident.to_string());
                self.bring(renamed.rename.to_string(), path, public);
            }
        }
    }

    fn bring(&mut self, local: String, path: Vec<String>, public: bool) {
        if public {
            self.handed_on.insert(local.clone());
        }
        self.imports.insert(local, path);
    }
}

impl<'ast> Visit<'ast> for File {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(i) => &i.attrs,
            Item::Fn(i) => &i.attrs,
            Item::Impl(i) => &i.attrs,
            Item::Use(i) => &i.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&item.tree, vec![], !matches!(item.vis, Visibility::Inherited));
    }

    /// `pub(crate)` and `pub(super)` are no imports.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.mentions.insert(path.segments.iter().map(|s| s.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // Names inside `format_args!` and the like.
        fn names(tokens: proc_macro2::TokenStream, out: &mut BTreeSet<Vec<String>>) {
            let mut path: Vec<String> = vec![];
            let mut colons = 0;
            for token in tokens {
                match token {
                    proc_macro2::TokenTree::Ident(name) => {
                        if colons != 2 {
                            out.insert(std::mem::take(&mut path));
                        }
                        path.push(name.to_string());
                        colons = 0;
                    }
                    proc_macro2::TokenTree::Punct(p) if p.as_char() == ':' => colons += 1,
                    proc_macro2::TokenTree::Group(group) => names(group.stream(), out),
                    _ => colons = 0,
                }
            }
            out.insert(path);
        }
        names(call.tokens.clone(), &mut self.mentions);
        visit::visit_macro(self, call);
    }
}

/// The crate's files by module.
struct Crate(BTreeMap<Module, File>);

impl Crate {
    fn read(folder: &str) -> Self {
        let root = root_of(folder).join("src");
        let files = sources(&root);
        assert!(files.len() > 20, "sources under {}", root.display());
        let file = |path: PathBuf| {
            let module = module_of(path.strip_prefix(&root).unwrap());
            (module, File::parse(&std::fs::read_to_string(path).unwrap()))
        };
        Self(files.into_iter().map(file).collect())
    }

    #[cfg(test)]
    fn of(files: &[(&str, &str)]) -> Self {
        Self(files.iter().map(|(path, text)| (module_of(Path::new(path)), File::parse(text))).collect())
    }

    /// The file in which what `path`, written in `from`, names is defined; `None` for other crates.
    fn resolve(&self, from: &Module, path: &[String], depth: usize) -> Option<Module> {
        assert!(depth < 20, "{path:?} in {from:?}");
        let (first, rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => vec![],
            "self" => from.clone(),
            "super" => from[..from.len().checked_sub(1)?].to_vec(),
            name => {
                let child: Module = from.iter().cloned().chain([name.to_owned()]).collect();
                match self.0[from].imports.get(name) {
                    Some(imported) if imported[0] != *name => {
                        let whole: Vec<String> = imported.iter().chain(rest).cloned().collect();
                        return self.resolve(from, &whole, depth + 1);
                    }
                    _ if self.0.contains_key(&child) => child,
                    _ => return None,
                }
            }
        };
        for (place, name) in rest.iter().enumerate() {
            if name == "super" {
                at.pop()?;
                continue;
            }
            let child: Module = at.iter().cloned().chain([name.clone()]).collect();
            if self.0.contains_key(&child) {
                at = child;
                continue;
            }
            let file = self.0.get(&at)?;
            if let Some(handed_on) = file.imports.get(name) {
                let whole: Vec<String> = handed_on.iter().chain(&rest[place + 1..]).cloned().collect();
                return self.resolve(&at, &whole, depth + 1);
            }
            for glob in &file.globs {
                let whole: Vec<String> = glob.iter().chain(&rest[place..]).cloned().collect();
                if let Some(found) = self.resolve(&at, &whole, depth + 1)
                    && found != at
                {
                    return Some(found);
                }
            }
            return Some(at);
        }
        Some(at)
    }

    /// The files that a file takes something from, itself left out.
    fn imports_of(&self, module: &Module) -> BTreeSet<Module> {
        let file = &self.0[module];
        let named = |name: &String| file.mentions.iter().any(|path| path.first() == Some(name));
        let used = file.imports.iter().filter(|(name, _)| !file.handed_on.contains(*name) || named(name));
        let paths = used.map(|(_, path)| path).chain(&file.mentions).chain(&file.globs);
        // A path through the root starts anew there; names alone are imports' or the file's own.
        let resolve = |path: &Vec<String>| self.resolve(module, path, 0);
        paths.filter_map(resolve).filter(|found| found != module).collect()
    }

    /// Files that import each other in circles, each group once.
    fn circles(&self) -> Vec<Vec<Module>> {
        let edges: BTreeMap<&Module, BTreeSet<Module>> = self.0.keys().map(|m| (m, self.imports_of(m))).collect();
        let reach = |from: &Module| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(next) = open.pop() {
                open.extend(edges[&next].iter().filter(|m| seen.insert((*m).clone())).cloned());
            }
            seen
        };
        let reached: BTreeMap<&Module, BTreeSet<Module>> = self.0.keys().map(|m| (m, reach(m))).collect();
        let mut groups = BTreeSet::new();
        for (module, seen) in &reached {
            if seen.contains(*module) {
                groups.insert(seen.iter().filter(|m| reached[m].contains(*module)).cloned().collect::<Vec<_>>());
            }
        }
        groups.into_iter().collect()
    }

    /// Every import that goes to the same layer or up.
    fn layer_violations(&self, layers: Layers) -> Vec<String> {
        let layer_of = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        let mut broken = Vec::new();
        for module in self.0.keys() {
            let Some(own) = module.first() else { continue };
            let Some(layer) = layer_of(own) else {
                broken.push(format!("module `{own}` has no layer: add it to ARCHITECTURE.md and to this test"));
                continue;
            };
            for target in self.imports_of(module) {
                let name = target.first().map_or("", String::as_str);
                // An exported macro stands at the root, whichever module defines it.
                if name == *own || name == "error" || name.is_empty() {
                    continue;
                }
                match layer_of(name) {
                    Some(other) if other < layer => {}
                    Some(other) => broken.push(format!("{module:?} (layer {layer}) uses {target:?} (layer {other})")),
                    None => broken.push(format!("{module:?} uses {target:?}, which has no layer")),
                }
            }
        }
        broken
    }
}

fn root_of(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

fn module_of(inside: &Path) -> Module {
    let mut parts: Module = inside.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test_file(&path) {
            found.push(path);
        }
    }
    found
}

/// Unit tests in a file of their own see all that they test.
fn is_test_file(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem.to_str().is_some_and(|stem| stem == "tests" || stem.ends_with("_tests")))
}

#[test]
fn modules_use_only_lower_layers() {
    for (_, folder, layers) in CRATES.iter().filter(|(_, _, layers)| !layers.is_empty()) {
        let broken = Crate::read(folder).layer_violations(layers);
        assert!(broken.is_empty(), "{folder}: {}", broken.join("\n"));
    }
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    for (_, folder, _) in CRATES {
        let tree = Crate::read(folder);
        let circles: Vec<String> = tree
            .circles()
            .iter()
            .map(|group| {
                let arrows = group.iter().flat_map(|from| {
                    let to = tree.imports_of(from).into_iter().filter(|to| group.contains(to));
                    to.map(move |to| format!("  {} -> {}", from.join("::"), to.join("::")))
                });
                arrows.collect::<Vec<_>>().join("\n")
            })
            .collect();
        assert!(circles.is_empty(), "{folder}: {} circles:\n{}", circles.len(), circles.join("\n\n"));
    }
}

/// Crates of the workspace that a manifest asks for, also for tests alone.
fn members_in(manifest: &str) -> BTreeSet<&'static str> {
    let of_package = |section: &&str| {
        let name = section.trim_start_matches('[').split(']').next().unwrap_or_default();
        !name.starts_with("workspace") && name.ends_with("dependencies")
    };
    let sections = manifest.split("\n[").filter(of_package);
    let names =
        sections.flat_map(|section| section.lines().skip(1)).filter_map(|line| line.split(['.', ' ', '=']).next());
    let names: BTreeSet<&str> = names.collect();
    CRATES.iter().map(|(name, ..)| *name).filter(|name| names.contains(name)).collect()
}

#[test]
fn crates_use_only_crates_below_them() {
    let mut below = BTreeSet::new();
    for (name, folder, _) in CRATES {
        let manifest = std::fs::read_to_string(root_of(folder).join("Cargo.toml")).unwrap();
        assert_eq!(members_in(&manifest), below, "{name}");
        below.insert(*name);
    }
    let planted = "[workspace.dependencies]\nsigmascale-cli = { path = \"cli\" }\n\n[dependencies]\nserde = \"1\"\n\n\
        [dev-dependencies]\nsigmascale-lab.workspace = true\n";
    assert_eq!(members_in(planted), BTreeSet::from(["sigmascale-lab"]));
}

/// The driver is `cuda`'s, and `unsafe` is there, in the launches of `device`, and where a checkpoint is mapped.
#[test]
fn the_driver_and_unsafe_code_stay_where_they_belong() {
    for (name, folder, _) in CRATES {
        let root = root_of(folder).join("src");
        for path in sources(&root) {
            let inside = path.strip_prefix(&root).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            let library = *name == "sigmascale";
            let cuda = library && inside.starts_with("cuda");
            assert!(cuda || !code.contains("cudarc"), "{}: only `cuda` may touch the driver", path.display());
            let allowed = library && (cuda || inside.starts_with("device") || inside == Path::new("model/shards.rs"));
            assert!(allowed || !code.contains("unsafe {"), "{}: unsafe code", path.display());
        }
    }
}

/// Layers by number as the tables of ARCHITECTURE.md have them, a table per crate.
fn written_layers(text: &str) -> Vec<BTreeMap<usize, BTreeSet<&str>>> {
    let mut tables: Vec<BTreeMap<usize, BTreeSet<&str>>> = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match (cells[0].parse(), tables.last_mut()) {
            (Ok(layer), Some(table)) => {
                table
                    .entry(layer)
                    .or_default()
                    .extend(cells[1].split(',').map(|module| module.trim().trim_matches('`')));
            }
            _ if cells[0] == "layer" => tables.push(BTreeMap::new()),
            _ => {}
        }
    }
    tables
}

#[test]
fn the_tables_are_those_of_the_architecture() {
    let text = std::fs::read_to_string(root_of(".").join("ARCHITECTURE.md")).unwrap();
    let numbered = |layers: Layers| layers.iter().map(|layer| layer.iter().copied().collect()).enumerate().collect();
    let layered = CRATES.iter().filter(|(_, _, layers)| !layers.is_empty());
    let enforced: Vec<BTreeMap<usize, BTreeSet<&str>>> = layered.map(|(_, _, layers)| numbered(layers)).collect();
    assert_eq!(written_layers(&text), enforced);
}

#[test]
fn planted_violations_are_found() {
    let lib = "pub mod bound; pub mod plan; mod error; pub use error::Error;";
    let found = |bound: &str| {
        let tree = Crate::of(&[
            ("lib.rs", lib),
            ("error.rs", "pub struct Error;"),
            ("plan.rs", "pub struct A;"),
            ("bound.rs", bound),
        ]);
        tree.layer_violations(&[&["error"], &["bound"], &["plan"]]).len()
    };
    assert_eq!(found("use crate::plan::A;"), 1, "higher layer");
    assert_eq!(found("fn f(x: &crate::plan::A) {}"), 1, "inline path");
    assert_eq!(found("use crate::{error::Error, plan::{A as B}};"), 1, "group");
    assert_eq!(found("use super::plan::A;"), 1, "around crate");
    assert_eq!(found("fn f() { format!(\"{}\", crate::plan::A); }"), 1, "in a macro");
    assert_eq!(found("//! [`crate::plan`]\nuse crate::Error;\n#[cfg(test)]\nmod tests { use crate::plan::A; }"), 0);
}

#[test]
fn planted_circles_are_found() {
    let circles = |parent: &str, a: &str, b: &str| {
        let files = [("lib.rs", "pub mod m;"), ("m/mod.rs", parent), ("m/a.rs", a), ("m/b.rs", b)];
        Crate::of(&files).circles().len()
    };
    let hands_on = "mod a; mod b; pub use a::A; pub use b::B;";
    assert_eq!(circles(hands_on, "pub struct A;", "use super::A; pub struct B(A);"), 0, "through the parent's hands");
    assert_eq!(circles(hands_on, "use super::B; pub struct A(B);", "use super::a::A; pub struct B;"), 1, "siblings");
    let uses = "mod a; mod b; pub use a::A; pub use b::B; pub struct P; fn f() -> A { A::new() }";
    assert_eq!(circles(uses, "use super::P; pub struct A(P);", "pub struct B;"), 1, "parent and child");
    assert_eq!(circles(uses, "pub struct A;", "use super::P; pub struct B(P);"), 0, "handed on, not used");
    assert_eq!(circles("mod a; mod b;", "use super::b; fn f() { b::g() }", "pub fn g() { super::a::f() }"), 1, "paths");
}
