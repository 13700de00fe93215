//! A process that is killed while it saves its state, at moments that nobody chose.
#![cfg(unix)]

use sigmascale::model::{AttentionSpec, preset};
use sigmascale::policy::{DelayedTeConfig, PolicyConfig, PolicyKind};
use sigmascale::runtime::{Runtime, RuntimeConfig, RuntimeState};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Where the child saves; without it the child does nothing.
const PLACE: &str = "SIGMASCALE_TEST_STATE";

/// Kills.
const ROUNDS: u64 = 60;

fn spec() -> AttentionSpec {
    preset("mistral-7b").unwrap()
}

/// Two states that differ in every part; histories make them large enough that a save takes time.
fn configs() -> [RuntimeConfig; 2] {
    let history = |history| PolicyConfig::DelayedTe(DelayedTeConfig { history, ..Default::default() });
    [1024, 700].map(|n| RuntimeConfig { policy: history(n), ..PolicyKind::DelayedTe.into() })
}

fn states() -> [RuntimeState; 2] {
    configs().map(|config| Runtime::new(&spec(), config).unwrap().state())
}

/// The process that gets killed.
#[test]
#[ignore = "the child of the test below"]
fn saves_for_ever() {
    let Some(path) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let states = states();
    for turn in 0.. {
        states[turn % 2].write(&path).unwrap();
        if turn == 1 {
            println!("saving");
        }
    }
}

fn kill_while_saving(path: &Path, after: Duration) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "saves_for_ever", "--nocapture"])
        .env(PLACE, path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("saving")), "the child ended before it saved");
    std::thread::sleep(after);
    // SIGKILL on Unix.
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}

#[test]
fn the_old_or_the_new_state_loads_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let (states, configs) = (states(), configs());
    let mut loaded = [0, 0];
    let mut cut = 0;
    for round in 0..ROUNDS {
        // Spread over several saves, in steps that do not divide one.
        kill_while_saving(&path, Duration::from_micros(round * 337 % 20_011));
        let state = RuntimeState::read(&path).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let which = states.iter().position(|known| *known == state).expect("one of the two, whole");
        loaded[which] += 1;
        Runtime::resume(&spec(), configs[which], state).unwrap();
        let rest = |entry: &std::fs::DirEntry| entry.path() != path;
        for left in std::fs::read_dir(folder.path()).unwrap().map(Result::unwrap).filter(rest) {
            cut += 1;
            std::fs::remove_file(left.path()).unwrap();
        }
    }
    println!("{loaded:?} of {ROUNDS} kills left the first or second state, {cut} came in the middle of a save");
    assert!(loaded[0] > 0 && loaded[1] > 0, "kills at different moments: {loaded:?}");
    assert!(cut > 0, "no kill came in the middle of a save");
}
