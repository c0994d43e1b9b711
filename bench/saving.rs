//! Results as files: `bench/results/<name>-<date>.md` and `.json`, with the hardware and the command.

use std::fs;
use std::process::Command;

use serde_json::Value;

/// `note`: what else must be known to read them.
pub fn save(name: &str, note: &str, table: &str, rows: &[Value]) -> std::io::Result<()> {
    let date = said("date", &["+%F"]);
    let commit = said("git", &["describe", "--always", "--dirty", "--abbrev=12"]);
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name\t: "))
        .unwrap_or("?");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let file = format!("{}/bench/results/{name}-{date}", env!("CARGO_MANIFEST_DIR"));
    let head = format!(
        "# {name}-{date}\n\n- {cpu}, {cores} cores; {note}\n- commit {commit}\n- `cargo bench --bench {name} -- --save`\n\n"
    );
    fs::write(format!("{file}.md"), format!("{head}{table}"))?;
    let json = serde_json::json!({ "date": date, "commit": commit, "cpu": cpu, "rows": rows });
    fs::write(format!("{file}.json"), format!("{json:#}\n"))?;
    println!("written: {file}.md, .json");
    Ok(())
}

fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_default()
}
