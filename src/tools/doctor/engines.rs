//! The engines of each Python that is found or named, and whether kvgate's connector loads there.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::Finding;
use crate::config::units::show_duration;

const CHECK: &str = "engines";
const SCRIPT: &str = include_str!("engines.py");
const MARK: &str = "kvgate-doctor:";
/// Bytes of a Python's output that are read.
const OUTPUT_MAX: u64 = 1 << 20;

/// `named`: all there are; empty: those of the active environment and of the path.
pub async fn check(named: &[PathBuf], limit: Duration) -> Vec<Finding> {
    let pythons = if named.is_empty() {
        on_path()
    } else {
        named.to_vec()
    };
    let mut found = Vec::new();
    for python in &pythons {
        found.extend(one(python, limit).await);
    }
    let has_engine = |finding: &Finding| finding.verdict != super::Verdict::NotChecked;
    if named.is_empty() && !found.iter().any(has_engine) {
        let because = "no Python on the path has vLLM, SGLang or kvgate";
        let advice = "Give the engine's own: --python /path/to/venv/bin/python";
        return vec![Finding {
            advice: Some(advice.into()),
            ..Finding::not_checked(CHECK, because)
        }];
    }
    found
}

/// The first of each name.
fn on_path() -> Vec<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|env| Path::new(&env).join("bin/python"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let of_path = ["python3", "python"].into_iter().filter_map(|name| {
        std::env::split_paths(&path)
            .map(|folder| folder.join(name))
            .find(|file| file.is_file())
    });
    let mut found: Vec<PathBuf> = Vec::new();
    for python in active
        .into_iter()
        .filter(|python| python.is_file())
        .chain(of_path)
    {
        // `python3` and `python` of one environment are the same.
        if found.iter().all(|known| known.parent() != python.parent()) {
            found.push(python);
        }
    }
    found
}

async fn one(python: &Path, limit: Duration) -> Vec<Finding> {
    let shown = python.display();
    let mut command = Command::new(python);
    command
        .args(["-W", "ignore", "-c", SCRIPT])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let advice = "Give --python the path of an interpreter, such as /path/to/venv/bin/python";
            return vec![Finding::failed(CHECK, format!("{shown}: {error}"), advice)];
        }
    };
    let mut text = Vec::new();
    let run = async {
        if let Some(out) = child.stdout.take() {
            // What was read before a failure is there.
            let _ = out.take(OUTPUT_MAX).read_to_end(&mut text).await;
        }
        child.wait().await
    };
    let ended = tokio::time::timeout(limit, run).await;
    let status = match &ended {
        Ok(Ok(status)) => status.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => String::new(),
    };
    let text = String::from_utf8_lossy(&text);
    let told: Vec<Value> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line.split_once(MARK)?.1).ok())
        .collect();
    let mut found = said(python, &told);
    let mut began = told.iter().filter_map(|line| line["begins"].as_str());
    let hangs = began.find(|module| !told.iter().any(|line| line["module"] == **module));
    match (ended.is_err(), hangs) {
        (true, module) => {
            let what = module.map_or_else(|| "it".to_owned(), |module| format!("import {module}"));
            let seen = format!("{shown}: {what} did not end within {}", show_duration(limit));
            found.push(Finding::failed(
                CHECK,
                seen,
                "Give it more time by --timeout; else try that import by hand",
            ));
        }
        (false, Some(module)) => {
            let seen = format!("{shown}: import {module} ended the process ({status})");
            let advice = format!("Try it by hand: {shown} -X faulthandler -c 'import {module}'");
            found.push(Finding::failed(CHECK, seen, advice));
        }
        (false, None) if told.is_empty() => {
            let seen = format!("{shown} is no Python that works ({status})");
            found.push(Finding::failed(CHECK, seen, "Give another with --python"));
        }
        _ => {}
    }
    found
}

fn said(python: &Path, told: &[Value]) -> Vec<Finding> {
    let shown = python.display();
    let Some(first) = told.first() else {
        return Vec::new();
    };
    let version = |name: &str| first["versions"][name].as_str();
    let install = format!("{shown} -m pip install kvgate=={}", env!("CARGO_PKG_VERSION"));
    let engines: Vec<String> = [("vllm", "vLLM"), ("sglang", "SGLang"), ("torch", "PyTorch")]
        .into_iter()
        .filter_map(|(name, title)| Some(format!("{title} {}", version(name)?)))
        .collect();
    let python = format!(
        "{shown} (Python {})",
        first["python"].as_str().unwrap_or_default()
    );
    let has_engine = version("vllm").is_some() || version("sglang").is_some();
    let Some(ours) = version("kvgate") else {
        return vec![match has_engine {
            true => {
                let seen = format!(
                    "{python} has {} and not kvgate: the engine can't load the connector",
                    engines.join(", ")
                );
                Finding::failed(CHECK, seen, install)
            }
            false => Finding::not_checked(CHECK, &format!("{python} has neither an engine nor kvgate")),
        }];
    };
    let mut found = Vec::new();
    let loads = |line: &Value| line["error"].is_null() && line["module"].as_str().is_some_and(is_connector);
    let another_loads = told.iter().any(loads);
    for line in told {
        let Some(module) = line["module"].as_str() else {
            continue;
        };
        if let Some(error) = line["error"].as_str() {
            let seen = format!("{python}: {module} does not load: {error}");
            let advice = format!("docs/SUPPORTED.md has the versions that do; {install}");
            found.push(match another_loads {
                true => Finding::warning(
                    CHECK,
                    seen,
                    format!("Nothing, if that engine is not used here. {advice}"),
                ),
                false => Finding::failed(CHECK, seen, advice),
            });
        }
    }
    if told.iter().any(|line| line["plugin"] == false) {
        let seen = format!("{python}: vLLM does not find kvgate's plugin");
        found.push(Finding::failed(
            CHECK,
            seen,
            format!("Install the wheel anew: {install} --force-reinstall"),
        ));
    }
    if ours != env!("CARGO_PKG_VERSION") {
        let seen = format!(
            "{python} has kvgate {ours}, and this program is {}",
            env!("CARGO_PKG_VERSION")
        );
        found.push(Finding::warning(
            CHECK,
            seen,
            format!("Use one version on a node: {install}"),
        ));
    }
    let loaded: Vec<&str> = told
        .iter()
        .filter(|line| line["error"].is_null())
        .filter_map(|line| line["module"].as_str())
        .collect();
    if !loaded.is_empty() {
        let engines = if engines.is_empty() {
            "no engine".to_owned()
        } else {
            engines.join(", ")
        };
        let seen = format!(
            "{python}: kvgate {ours}, {engines}; {} load",
            loaded.join(" and ")
        );
        found.push(Finding::ok(CHECK, seen));
    }
    found
}

/// Of an engine.
fn is_connector(module: &str) -> bool {
    module.starts_with("kvgate.")
}
