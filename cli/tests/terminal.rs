//! The command on a terminal: a pseudo-terminal stands for it.
#![cfg(unix)]

mod run;

use run::TINY_LLAMA;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

/// A terminal of 120 columns.
fn terminal() -> (File, File) {
    terminal_of(120)
}

/// A terminal: what the user sees, and what the command writes to.
fn terminal_of(ws_col: u16) -> (File, File) {
    let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&user).unwrap();
    unlockpt(&user).unwrap();
    let name = ptsname(&user, Vec::new()).unwrap().into_string().unwrap();
    let device = OpenOptions::new().read(true).write(true).open(name).unwrap();
    tcsetwinsize(device.as_fd(), Winsize { ws_row: 40, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (user.into(), device)
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sigmascale"));
    command.args(args).stdin(Stdio::null()).env("TERM", "xterm-256color").env_remove("RUST_LOG").env_remove("NO_COLOR");
    command
}

/// Everything that appears on the terminal, and the exit code. Standard output goes there too unless it is set.
fn shown(command: &mut Command, stdout: Option<Stdio>) -> (i32, String) {
    let (user, device) = terminal();
    command.stderr(device.try_clone().unwrap()).stdout(stdout.unwrap_or_else(|| device.into()));
    seen_by(user, command)
}

/// What standard output puts on a terminal of this width, line by line, without colors.
fn result_at(columns: u16, args: &[&str]) -> Vec<String> {
    let (user, device) = terminal_of(columns);
    let mut command = command(args);
    command.env("NO_COLOR", "1").stderr(Stdio::null()).stdout(device);
    let (code, seen) = seen_by(user, &mut command);
    assert!((0..=1).contains(&code), "{args:?}: {code} {seen}");
    seen.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// Runs a command whose outputs are set, and reads its terminal.
fn seen_by(mut user: File, command: &mut Command) -> (i32, String) {
    let mut child = command.spawn().unwrap();
    // The parent's copies: the terminal ends when the child does.
    command.stderr(Stdio::null()).stdout(Stdio::null());
    let mut seen = Vec::new();
    let mut part = [0; 4096];
    loop {
        match user.read(&mut part) {
            Ok(0) => break,
            Ok(count) => seen.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // EIO: nobody has the terminal open any more.
            Err(_) => break,
        }
    }
    let seen = String::from_utf8(seen).unwrap();
    assert!(!seen.contains("tracing-subscriber") && !seen.contains("panicked"), "{seen}");
    (child.wait().unwrap().code().unwrap(), seen)
}

fn on_terminal(args: &[&str]) -> (i32, String) {
    shown(&mut command(args), None)
}

/// Escape sequences that set colors or weights.
fn styles(text: &str) -> bool {
    text.split("\u{1b}[")
        .skip(1)
        .any(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m'))
}

#[test]
fn commands_say_what_they_say_elsewhere_and_nothing_else() {
    for (args, part) in [
        (&["--help"][..], "Exit codes: 0 done"),
        (&["stress", "--help"], "--auto-c-kappa"),
        (&["doctor"], "memory"),
        (&["families"], "llama"),
        (&["calibrate", "mistral-7b"], "c_star 0.035214"),
        (&["calibrate", TINY_LLAMA], "worst-case bound"),
        (&["inspect", TINY_LLAMA], "Sigma of 24 heads"),
    ] {
        let (code, seen) = on_terminal(args);
        assert!(code == 0 && seen.contains(part), "{args:?}: {code} {seen}");
    }
    let (code, seen) = on_terminal(&["calibrate", "mistral-7b", "--delta", "2"]);
    assert!(code == 2 && seen.contains("delta 2"), "{code} {seen}");
}

const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/runs/low-precision.jsonl");

/// Prose is wrapped and tables are folded; words longer than a line and commands, which are copied, stay whole.
#[test]
fn results_fit_their_terminal() {
    let commands = [
        &["calibrate", "mistral-7b"][..],
        &["calibrate", TINY_LLAMA],
        &["calibrate", TINY_LLAMA, "--as-paper"],
        &["calibrate", "deepseek-v3"],
        &["inspect", TINY_LLAMA],
        &["diagnose", RECORD],
        &["doctor"],
        &["families"],
        &STRESS,
    ];
    for args in commands {
        let wide = result_at(500, args);
        let numbers = |lines: &[String]| {
            let text = lines.join(" ");
            text.split_whitespace().filter(|word| word.parse::<f64>().is_ok()).count()
        };
        for columns in [60, 80, 100, 160] {
            let lines = result_at(columns, args);
            let long = |line: &&String| {
                let words = line.split_whitespace().filter(|word| word.chars().count() > usize::from(columns) / 2);
                line.chars().count() > usize::from(columns) && words.count() == 0 && !line.starts_with("Next: ")
            };
            assert_eq!(lines.iter().find(long), None, "{args:?} at {columns}");
            assert!(numbers(&lines) >= numbers(&wide), "{args:?} at {columns} loses numbers: {}", lines.join("\n"));
        }
    }
}

const STRESS: [&str; 10] =
    ["stress", "weight-spike", "--model", TINY_LLAMA, "--layers", "2", "--seq-len", "16", "--steps", "3"];

#[test]
fn progress_says_step_total_and_time_left() {
    let (code, seen) = on_terminal(&STRESS);
    assert_eq!(code, 0, "{seen}");
    assert!(seen.contains("weight-spike: layer 2/2, step 3/3, ") && seen.contains(" left"), "{seen}");
    // The bar is gone before the result comes.
    let result = seen.find("weight-spike, mode operands").unwrap();
    assert!(!seen[result..].contains(" left") && seen[..result].contains("layer 1/2"), "{seen}");
}

/// The first picture names the work, with an empty bar and no guess of the time.
#[test]
fn progress_starts_with_what_is_made() {
    for (args, first) in
        [(&STRESS[..], "weight-spike: the first step"), (&["calibrate", TINY_LLAMA], "calibrate: layer 0/6")]
    {
        let (code, seen) = on_terminal(args);
        let (before, after) = seen.split_once(first).unwrap_or_else(|| panic!("{seen}"));
        assert!(code == 0 && !before.contains('█') && !after.starts_with(','), "{seen}");
    }
}

#[test]
fn log_lines_have_a_line_of_their_own() {
    let (code, seen) = shown(command(&["calibrate", TINY_LLAMA]).env("RUST_LOG", "sigmascale=debug"), None);
    let mut lines = 0;
    for (at, _) in seen.match_indices("Z DEBUG") {
        // A line begins with its time.
        let line = &seen[..at - "2026-01-01T00:00:00.000000".len()];
        assert!(line.is_empty() || line.ends_with(['\n', '\r', 'K', 'J', 'G']), "{seen:?}");
        lines += 1;
    }
    assert!(code == 0 && lines > 0, "{seen:?}");
    let (code, seen) = shown(command(&["families"]).env("RUST_LOG", "===bad"), None);
    assert!(code == 0 && seen.contains("warning: RUST_LOG====bad is ignored"), "{seen:?}");
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let full = || Some(File::options().write(true).open("/dev/full").unwrap().into());
    for args in [&["--help"][..], &["--version"], &["calibrate", "--help"]] {
        let (code, seen) = shown(&mut command(args), full());
        assert!(code == 1 && seen.contains("cannot write"), "{args:?}: {code} {seen}");
    }
}

#[test]
fn a_file_on_a_terminal_is_confirmed_below_the_bar() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let (code, seen) = on_terminal(&[&STRESS[..], &["--format", "json", "-o", file.to_str().unwrap()]].concat());
    assert!(code == 0 && seen.trim_end().ends_with(&format!("wrote {}", file.display())), "{seen}");
}

#[test]
fn colours_follow_no_color() {
    let folder = tempfile::tempdir().unwrap();
    // A preset's name that is also a folder gives a warning, which is logged.
    std::fs::create_dir(folder.path().join("mistral-7b")).unwrap();
    let mut coloured = 0;
    for args in [&["--help"][..], &["calibrate", "--steps", "0", "x"], &["calibrate", "mistral-7b"], &STRESS] {
        let here = |command: &mut Command| shown(command.current_dir(folder.path()), None).1;
        coloured += usize::from(styles(&here(&mut command(args))));
        let plain = here(command(args).env("NO_COLOR", "1"));
        assert!(!plain.is_empty() && !styles(&plain), "{args:?}: {plain:?}");
    }
    assert!(coloured >= 3, "help, usage errors and verdicts have colours where nothing forbids them");
    let dull = shown(command(&STRESS).current_dir(folder.path()).env("CLICOLOR", "0"), None).1;
    assert!(!styles(&dull) && dull.contains("OVERFLOW"), "{dull:?}");
    let warning = shown(command(&["calibrate", "mistral-7b"]).current_dir(folder.path()), None).1;
    assert!(warning.contains("./mistral-7b"), "{warning}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    for args in [&["--help"][..], &["families"], &["calibrate", TINY_LLAMA, "--format", "json"], &STRESS] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (code, seen) = shown(&mut command(args), Some(writer.into()));
        assert!(code == 0 && !seen.contains("error"), "{args:?}: {code} {seen}");
    }
}

#[test]
fn a_terminal_that_is_gone_ends_without_a_panic() {
    for args in [&["--help"][..], &["calibrate", TINY_LLAMA], &["calibrate", "no-such-model"], &STRESS] {
        let (user, device) = terminal();
        let mut command = command(args);
        command.stderr(device.try_clone().unwrap()).stdout(device);
        drop(user);
        let code = command.status().unwrap().code();
        assert!(matches!(code, Some(0..=2)), "{args:?}: {code:?}");
    }
}
