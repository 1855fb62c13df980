//! `jericho check`.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use jericho_fs::check::data::check_data_among;
use jericho_fs::check::{CheckOptions, Finding, Progress, Report, Severity, Stage, check_among};
use serde::Serialize;

use crate::args::CheckArgs;
use crate::failure::{Context, Failure, Outcome, print, print_json};
use crate::size;

pub fn run(args: &CheckArgs) -> Outcome {
    let options = CheckOptions {
        repair: args.repair,
        force: args.force,
    };
    let progress = Arc::new(Progress::default());
    let (end, has_ended) = channel();
    let report = std::thread::scope(|scope| {
        let shown = &progress;
        scope.spawn(move || show(shown, &has_ended));
        let report = match args.data {
            true => check_data_among(&args.volume, &args.device, options, &progress),
            false => check_among(&args.volume, &args.device, options, &progress),
        };
        drop(end);
        report
    });
    let report = report.map_err(|e| Failure::new(e.to_string()))?;
    if args.json {
        print_json(&Json::of(&report))?;
    } else {
        let shown = args.volume.display().to_string();
        print(&text(&shown, &report, args.repair).context("cannot write the text")?)?;
    }
    Ok(if report.is_sound() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Time between two pictures of the progress.
const PICTURE: Duration = Duration::from_millis(100);

/// Shows the progress on standard error until the check ends, if that is a terminal.
fn show(progress: &Progress, has_ended: &Receiver<()>) {
    // Hides itself where standard error is not a terminal.
    let bar = ProgressBar::new(0);
    let style = |template| ProgressStyle::with_template(template).ok();
    let known = style("{spinner} {msg} {wide_bar} {percent}%");
    let unknown = style("{spinner} {msg}");
    loop {
        let (stage, done, total) = progress.state();
        let style = if total.is_some() { &known } else { &unknown };
        if let Some(style) = style {
            bar.set_style(style.clone());
        }
        bar.set_length(total.unwrap_or(0));
        bar.set_position(done);
        bar.set_message(match stage {
            Stage::Pages => format!("metadata: {} read", size::human(done)),
            Stage::Names => format!("names and inodes: {done} rows compared"),
            Stage::Space => format!("space: {done} rows compared"),
            Stage::Data => format!("data: {} read", size::human(done)),
        });
        bar.tick();
        if has_ended.recv_timeout(PICTURE) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    bar.finish_and_clear();
}

#[derive(Serialize)]
struct Json<'r> {
    sound: bool,
    findings: Vec<JsonFinding<'r>>,
    repaired: Vec<JsonFinding<'r>>,
    directories: u64,
    files: u64,
    used_bytes: u64,
    metadata_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    damaged_pages: Option<u64>,
}

#[derive(Serialize)]
struct JsonFinding<'r> {
    severity: &'static str,
    text: &'r str,
}

impl<'r> Json<'r> {
    fn of(report: &'r Report) -> Json<'r> {
        let list = |findings: &'r [Finding]| {
            findings
                .iter()
                .map(|f| JsonFinding {
                    severity: word(f.severity),
                    text: &f.text,
                })
                .collect()
        };
        Json {
            sound: report.is_sound(),
            findings: list(&report.findings),
            repaired: list(&report.repaired),
            directories: report.directories,
            files: report.files,
            used_bytes: report.used_bytes,
            metadata_bytes: report.metadata_bytes,
            read_bytes: report.read_bytes,
            damaged_pages: report.read_bytes.map(|_| report.damaged_pages),
        }
    }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Leak => "leak",
        Severity::Damage => "damage",
    }
}

fn text(volume: &str, report: &Report, repair: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for finding in &report.repaired {
        writeln!(out, "repaired: {}", finding.text)?;
    }
    for finding in &report.findings {
        writeln!(out, "{}: {}", word(finding.severity), finding.text)?;
    }
    writeln!(
        out,
        "{volume}: {} directories, {} other inodes, {} of data, {} of metadata",
        report.directories,
        report.files,
        size::human(report.used_bytes),
        size::human(report.metadata_bytes)
    )?;
    if let Some(bytes) = report.read_bytes {
        let (read, damaged) = (size::human(bytes), report.damaged_pages);
        writeln!(
            out,
            "{volume}: {read} of data read, {damaged} pages damaged or unreadable"
        )?;
    }
    let wrong = (report.findings.iter()).filter(|found| found.severity != Severity::Info);
    if report.is_sound() {
        writeln!(out, "{volume} is sound")?;
    } else if repair || wrong.count() == report.data_findings {
        writeln!(
            out,
            "{volume} is NOT sound, and this could not be repaired: restore the files named \
                       above from a backup"
        )?;
    } else {
        writeln!(
            out,
            "{volume} is NOT sound; repair it with: jericho check --repair {volume}"
        )?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_with_findings_says_how_to_repair_it() {
        let damage = Finding {
            severity: Severity::Damage,
            text: "inode 7 has no name".into(),
        };
        let report = Report {
            findings: vec![damage],
            ..Report::default()
        };
        let text = text("v", &report, false).unwrap();
        assert!(text.contains("damage: inode 7 has no name"), "{text}");
        assert!(text.contains("jericho check --repair v"), "{text}");
        assert!(!report.is_sound());
    }
}
