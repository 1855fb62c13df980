//! `jericho check`.

use std::fmt::Write;
use std::process::ExitCode;

use jericho_fs::check::{CheckOptions, Finding, Report, Severity, check_among};
use serde::Serialize;

use crate::args::CheckArgs;
use crate::failure::{Context, Failure, Outcome, print, print_json};
use crate::size;

pub fn run(args: &CheckArgs) -> Outcome {
    let report = check_among(
        &args.volume,
        &args.device,
        CheckOptions {
            repair: args.repair,
            force: args.force,
        },
    )
    .map_err(|e| Failure::new(e.to_string()))?;
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

#[derive(Serialize)]
struct Json<'r> {
    sound: bool,
    findings: Vec<JsonFinding<'r>>,
    repaired: Vec<JsonFinding<'r>>,
    directories: u64,
    files: u64,
    used_bytes: u64,
    metadata_bytes: u64,
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
    if report.is_sound() {
        writeln!(out, "{volume} is sound")?;
    } else if repair {
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
