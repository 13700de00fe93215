//! Compiled kernels on disk.
//!
//! One file per entry, named by a 128-bit hash of everything that goes into the compilation: the source and all headers,
//! the compiler's build, the options, the architecture. A file is written under an unpredictable name in the same folder and
//! published by one rename, so two processes can fill the same entry at once; the last one wins and both are right.
//! Every entry carries its length and a checksum: a damaged one is compiled again, never loaded.
//!
//! The folder is `SIGMASCALE_CACHE`, else `$XDG_CACHE_HOME/sigmascale`, else `~/.cache/sigmascale`, made for this user
//! alone. What is read from it runs on the GPU, so a folder that belongs to another user, or that others can write, is not
//! used. A folder that cannot be used only costs time: the kernel is compiled again in the next process.

use super::nvrtc::{Compiled, Request};
use super::sources;
use crate::error::Result;
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"sigma-c1";

/// Where compiled kernels are kept, if the environment names a place.
pub fn default_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    variable("SIGMASCALE_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("sigmascale")))
        .or_else(|| variable("HOME").map(|p| p.join(".cache/sigmascale")))
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The cache in `folder`; `None` keeps nothing.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// The entry of `request`, or `build`'s result, which is then kept. `compiler`: what [`compiler_build`] says.
    ///
    /// [`compiler_build`]: super::compiler_build
    ///
    /// # Errors
    /// Only those of `build`: a cache that cannot be read or written is passed over.
    pub fn get_or_build(
        &self,
        request: &Request,
        compiler: &str,
        build: impl FnOnce() -> Result<Compiled>,
    ) -> Result<Compiled> {
        let Some(folder) = &self.folder else { return build() };
        let path = folder.join(format!("{}-{}.cubin", request.source.name.replace('/', "-"), key(request, compiler)));
        let private = private(folder);
        if let Err(e) = &private {
            tracing::warn!("the kernel cache {} is not used: {e}", folder.display());
        } else if let Some(found) = read(&path).ok().and_then(|bytes| decode(&bytes)) {
            return Ok(found);
        }
        let built = build()?;
        if private.is_ok()
            && let Err(e) = publish(folder, &path, &encode(&built))
        {
            tracing::debug!("compiled kernel not kept in {}: {e}", path.display());
        }
        Ok(built)
    }
}

/// 128 bits over everything that determines the result, in hexadecimal.
fn key(request: &Request, compiler: &str) -> String {
    let mut hash = Fnv128::new();
    let mut field = |bytes: &[u8]| {
        hash.write(&(bytes.len() as u64).to_le_bytes());
        hash.write(bytes);
    };
    field(env!("CARGO_PKG_VERSION").as_bytes());
    field(compiler.as_bytes());
    field(request.source.name.as_bytes());
    field(request.source.text.as_bytes());
    for (name, body) in sources::HEADERS {
        field(name.as_bytes());
        field(body.as_bytes());
    }
    for option in request.options() {
        field(option.as_bytes());
    }
    format!("{:032x}", hash.0)
}

/// FNV-1a over 128 bits: a content key among files of one's own, not a defence against an attacker.
struct Fnv128(u128);

impl Fnv128 {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}

fn checksum(bytes: &[u8]) -> [u8; 16] {
    let mut hash = Fnv128::new();
    hash.write(bytes);
    hash.0.to_le_bytes()
}

/// magic, cubin length, log length (u64, little endian), checksum of the rest, cubin, log.
fn encode(compiled: &Compiled) -> Vec<u8> {
    let body = [&compiled.cubin, compiled.log.as_bytes()].concat();
    let lengths = [compiled.cubin.len() as u64, compiled.log.len() as u64].map(u64::to_le_bytes).concat();
    [MAGIC.as_slice(), &lengths, &checksum(&body), &body].concat()
}

fn decode(bytes: &[u8]) -> Option<Compiled> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (lengths, rest) = rest.split_at_checked(16)?;
    let (sum, body) = rest.split_at_checked(16)?;
    let length = |i: usize| usize::try_from(u64::from_le_bytes(lengths[i..i + 8].try_into().ok()?)).ok();
    let (cubin, log) = (length(0)?, length(8)?);
    if cubin.checked_add(log)? != body.len() || checksum(body) != sum {
        return None;
    }
    Some(Compiled { cubin: body[..cubin].to_vec(), log: String::from_utf8(body[cubin..].to_vec()).ok()? })
}

/// Makes the folder, or checks that it is this user's and that nobody else can write it.
fn private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = std::fs::metadata(folder)?;
    if metadata.uid() != user()? {
        return Err(io::Error::other("it belongs to another user"));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other("others can write it (chmod go-w)"));
    }
    Ok(())
}

/// The user that this process acts as.
fn user() -> io::Result<u32> {
    std::fs::metadata("/proc/self").map(|metadata| metadata.uid())
}

/// A file of this user's.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    if file.metadata()?.uid() != user()? {
        return Err(io::Error::other("it belongs to another user"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn publish(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = folder.join(format!(".{:016x}.tmp", RandomState::new().hash_one(path)));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let done = file.write_all(bytes).and_then(|()| std::fs::rename(&temporary, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::{Arch, compile, compiler_version};
    use super::*;
    use crate::error::Error;
    use std::cell::Cell;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command, Stdio};

    /// Folder that a child fills; set for children alone.
    const CHILD: &str = "SIGMASCALE_TEST_CACHE_CHILD";
    const BUILD: &str = "release 13.0, V13.0.88";

    fn request() -> Request {
        Request::new(sources::ALL[0], Arch::SM90A).define("A", 1)
    }

    fn sample() -> Compiled {
        Compiled { cubin: (0..=255).collect(), log: "said".into() }
    }

    #[test]
    fn an_entry_is_built_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().join("deep/er")));
        let built = Cell::new(0);
        for _ in 0..3 {
            let got = cache.get_or_build(&request(), BUILD, || {
                built.set(built.get() + 1);
                Ok(sample())
            });
            assert_eq!(got.unwrap(), sample());
        }
        assert_eq!(built.get(), 1);
        assert_eq!(std::fs::read_dir(folder.path().join("deep/er")).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn a_damaged_entry_is_rebuilt() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().into()));
        cache.get_or_build(&request(), BUILD, || Ok(sample())).unwrap();
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let good = std::fs::read(&path).unwrap();
        for position in [0, 9, 20, 30, 41, good.len() - 1] {
            let mut bad = good.clone();
            bad[position] ^= 0x10;
            std::fs::write(&path, &bad).unwrap();
            let built = Cell::new(false);
            cache
                .get_or_build(&request(), BUILD, || {
                    built.set(true);
                    Ok(sample())
                })
                .unwrap();
            assert!(built.get(), "byte {position}");
            assert_eq!(std::fs::read(&path).unwrap(), good);
        }
        for length in 0..good.len() {
            assert_eq!(decode(&good[..length]), None, "{length}");
        }
    }

    #[test]
    fn everything_that_matters_is_in_the_key() {
        let base = key(&request(), BUILD);
        assert_ne!(base, key(&request(), "release 13.0, V13.0.89"));
        assert_ne!(base, key(&request().define("B", 2), BUILD));
        assert_ne!(base, key(&Request { arch: Arch::SM80, ..request() }, BUILD));
        let edited = sources::Source { text: "other", ..request().source };
        assert_ne!(base, key(&Request { source: edited, ..request() }, BUILD));
        assert_eq!(base, key(&request(), BUILD));
    }

    #[test]
    fn a_failed_build_is_reported_and_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().into()));
        assert!(cache.get_or_build(&request(), BUILD, || Err(Error::cuda("no"))).unwrap_err().is_cuda());
        assert_eq!(cache.get_or_build(&request(), BUILD, || Ok(sample())).unwrap(), sample());
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_only_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::new(Some(file.path().join("below")));
        assert_eq!(cache.get_or_build(&request(), BUILD, || Ok(sample())).unwrap(), sample());
    }

    #[test]
    fn only_a_private_folder_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("cache");
        let cache = Cache::new(Some(at.clone()));
        let mode = |bits| std::fs::set_permissions(&at, std::fs::Permissions::from_mode(bits)).unwrap();
        let builds = || {
            let built = Cell::new(false);
            let got = cache.get_or_build(&request(), BUILD, || {
                built.set(true);
                Ok(sample())
            });
            assert_eq!(got.unwrap(), sample());
            built.get()
        };
        assert!(builds() && !builds());
        assert_eq!(std::fs::metadata(&at).unwrap().mode() & 0o777, 0o700);
        let entry = std::fs::read_dir(&at).unwrap().next().unwrap().unwrap();
        assert_eq!(entry.metadata().unwrap().mode() & 0o777, 0o600);
        for open in [0o777, 0o720, 0o702] {
            mode(open);
            assert!(builds(), "{open:o}: what others may have written is not read");
            std::fs::remove_file(entry.path()).unwrap();
            assert!(builds());
            assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0, "{open:o}: and nothing is written there");
            mode(0o755);
            assert!(builds() && !builds());
        }
    }

    #[test]
    fn many_writers_agree() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let cache = Cache::new(Some(folder.path().into()));
                    for _ in 0..20 {
                        assert_eq!(cache.get_or_build(&request(), BUILD, || Ok(sample())).unwrap(), sample());
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// Several writes long.
    fn large() -> Compiled {
        Compiled { cubin: (0..20_000u32).map(|i| ((i * 31) >> 3) as u8).collect(), log: "said".into() }
    }

    /// The test below in a process of its own, for a folder.
    fn child(folder: &Path) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["cuda::cache::tests::processes_fill_one_cache_at_once", "--exact", "--nocapture"])
            .env(CHILD, folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn processes_fill_one_cache_at_once() {
        if let Some(folder) = std::env::var_os(CHILD) {
            for _ in 0..200 {
                let cache = Cache::new(Some(folder.clone().into()));
                assert_eq!(cache.get_or_build(&request(), BUILD, || Ok(large())).unwrap(), large());
                // Somebody clears the cache now and then.
                let entry = std::fs::read_dir(&folder).unwrap().flatten().find(|e| e.path().extension().is_some());
                if let Some(entry) = entry {
                    let _ = std::fs::remove_file(entry.path());
                }
            }
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let children: Vec<Child> = (0..3).map(|_| child(folder.path())).collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
        // What is left is whole.
        let built = Cell::new(false);
        let cache = Cache::new(Some(folder.path().into()));
        cache.get_or_build(&request(), BUILD, || Ok(large())).unwrap();
        cache
            .get_or_build(&request(), BUILD, || {
                built.set(true);
                Ok(large())
            })
            .unwrap();
        assert!(!built.get());
    }

    #[test]
    fn a_failed_compilation_gives_the_whole_log_and_keeps_nothing() {
        if compiler_version().is_err() {
            println!("ignored: a_failed_compilation_gives_the_whole_log_and_keeps_nothing: no NVRTC");
            return;
        }
        let text = "__device__ void first() { missing_one; }\n__device__ void second() { missing_two; }\n";
        let broken = Request::new(sources::Source { name: "broken", text }, Arch::SM90A);
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().into()));
        let error = cache.get_or_build(&broken, BUILD, || compile(&broken)).unwrap_err().to_string();
        for part in ["broken does not compile for sm_90a", "broken(1)", "missing_one", "broken(2)", "missing_two"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        // A damaged entry of a real kernel is compiled again, to the same bytes.
        let good = Request::new(sources::GAINS, Arch::SM90A);
        let first = cache.get_or_build(&good, BUILD, || compile(&good)).unwrap();
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        // The log holds a time.
        let again = cache.get_or_build(&good, BUILD, || compile(&good)).unwrap();
        assert!(again.cubin == first.cubin, "other bytes");
    }
}
