//! Results as files: `bench/results/<name>-<date>.md` and `.json`, with the hardware, the commit and the command.

use std::fs;
use std::process::Command;

use serde::Serialize;
use serde_json::json;

/// `name`: of the files. `note`: what else must be known to read them.
pub fn save(bench: &str, name: &str, note: &str, table: &str, rows: &impl Serialize) -> std::io::Result<()> {
    let date = said("date", &["-u", "+%F"]);
    let commit = said("git", &["describe", "--always", "--dirty", "--abbrev=12"]);
    let rustc = said("rustc", &["--version"]);
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name\t: "))
        .unwrap_or("?");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let arguments = arguments.map(|argument| match argument.contains(' ') {
        true => format!("{argument:?}"),
        false => argument,
    });
    let command = format!(
        "cargo bench --bench {bench} -- {}",
        arguments.collect::<Vec<_>>().join(" ")
    );
    let file = format!("{}/bench/results/{name}-{date}", env!("CARGO_MANIFEST_DIR"));
    let head = format!(
        "# {name}-{date}\n\n- {cpu}, {cores} cores; {note}\n- {rustc}\n- commit {commit}\n- `{command}`\n\n"
    );
    fs::write(format!("{file}.md"), format!("{head}{table}"))?;
    let json = json!({
        "date": date, "commit": commit, "rustc": rustc, "cpu": cpu, "cores": cores, "command": command, "note": note,
        "rows": rows,
    });
    fs::write(format!("{file}.json"), format!("{json:#}\n"))?;
    println!("written: {file}.md, .json");
    Ok(())
}

fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_default()
}
