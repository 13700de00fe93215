//! `sigmascale completions` and `sigmascale man`: what a shell and `man` read, made from the same definitions as `--help`.

use super::output::{write_file, write_stdout};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use sigmascale::{Error, Result};
use std::path::{Path, PathBuf};

/// Print a completion script for a shell
///
/// For bash: sigmascale completions bash > ~/.local/share/bash-completion/completions/sigmascale
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// Shell that reads the script
    #[arg(value_enum)]
    shell: Shell,
}

/// Print the man page, or write those of all commands to a folder
///
/// To read it at once: sigmascale man | man -l -
#[derive(clap::Args)]
pub struct ManArgs {
    /// Write sigmascale.1 and one page for each command to this existing folder
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

/// Prints the completion script.
pub fn completions(args: CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "sigmascale", &mut script);
    write_stdout(&text(script))
}

/// Prints or writes the man pages.
pub fn man(args: ManArgs, mut command: Command) -> Result<()> {
    // Gives subcommands their full names, `sigmascale-calibrate`.
    command.build();
    let Some(folder) = args.dir else {
        return write_stdout(&page(&command)?.1);
    };
    if !folder.is_dir() {
        return Err(Error::argument(format_args!("--dir {}: no such folder, create it first", folder.display())));
    }
    write(&folder, &command)
}

/// Writes the pages of a command and of those below it.
fn write(folder: &Path, command: &Command) -> Result<()> {
    for below in command.get_subcommands().filter(|command| command.get_name() != "help") {
        write(folder, below)?;
    }
    let (file, page) = page(command)?;
    write_file(&folder.join(file), page.as_bytes())
}

/// File name and text of a page.
fn page(command: &Command) -> Result<(String, String)> {
    let man = Man::new(command.clone()).source(concat!("sigmascale ", env!("CARGO_PKG_VERSION"))).manual("Sigmascale");
    let mut page = Vec::new();
    man.render(&mut page).map_err(|error| Error::io(Path::new(&man.get_filename()), "write the man page", error))?;
    Ok((man.get_filename(), text(page)))
}

/// What the generators write is UTF-8: it comes from string literals.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}
