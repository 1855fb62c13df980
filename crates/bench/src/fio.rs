//! A run of fio and its results.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::Result;

/// A job for fio. `args` are its options without the leading dashes.
pub struct Job {
    command: Command,
}

/// Results of all jobs of a run together.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Operations per second.
    pub iops: f64,
    /// MiB per second, including the final sync if the job has one.
    pub mib_per_s: f64,
    /// Number of operations.
    pub operations: u64,
    /// CPU time of fio for each operation.
    pub cpu_us: f64,
}

impl Job {
    /// Creates a job whose files are in a directory.
    pub fn in_dir(dir: &Path, args: &[&str]) -> Job {
        Job::new(format!("--directory={}", dir.display()), args)
    }

    /// Creates a job on one file.
    pub fn on_file(file: &Path, args: &[&str]) -> Job {
        Job::new(format!("--filename={}", file.display()), args)
    }

    /// Creates a job on the export of an NBD server. fio uses libnbd for it.
    pub fn on_nbd(uri: &str, args: &[&str]) -> Job {
        let uri = format!("uri={uri}");
        // fio knows the option only after the engine.
        let args: Vec<&str> = [uri.as_str()].iter().chain(args).copied().collect();
        Job::new("--ioengine=nbd".into(), &args)
    }

    fn new(place: String, args: &[&str]) -> Job {
        let mut command = Command::new("fio");
        command
            .args(["--name=bench", "--group_reporting", "--output-format=json"])
            .args([
                "--fallocate=none",
                "--randrepeat=0",
                "--norandommap=0",
                &place,
            ])
            .args(args.iter().map(|arg| format!("--{arg}")));
        Job { command }
    }

    /// Returns the same job as a program under `jericho run`.
    pub fn under(self, jericho: &Path) -> Job {
        let mut command = Command::new(jericho);
        command
            .args(["run", "--"])
            .arg(self.command.get_program())
            .args(self.command.get_args());
        Job { command }
    }

    /// Runs the job to its end.
    pub fn run(mut self) -> Result<Measured> {
        let output = self
            .command
            .output()
            .map_err(|e| format!("fio could not be started: {e}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(format!(
                "{:?} failed ({}):\n{text}{errors}",
                self.command, output.status
            )
            .into());
        }
        // Notes to the user may precede the JSON.
        let json = text.find('{').map_or("", |start| &text[start..]);
        let report: Value = serde_json::from_str(json)
            .map_err(|e| format!("fio printed no JSON ({e}):\n{text}"))?;
        let number = |direction: &str, key: &str| {
            let value = &report["jobs"][0][direction][key];
            value
                .as_f64()
                .ok_or_else(|| format!("fio reported no {direction}.{key}"))
        };
        let sum = |key: &str| -> Result<f64> { Ok(number("read", key)? + number("write", key)?) };
        let job = &report["jobs"][0];
        let percent = |key: &str| {
            job[key]
                .as_f64()
                .ok_or_else(|| format!("fio reported no {key}"))
        };
        let cpu = (percent("usr_cpu")? + percent("sys_cpu")?) / 100.0;
        let iops = sum("iops")?;
        Ok(Measured {
            cpu_us: cpu * 1e6 / iops,
            iops,
            mib_per_s: sum("bw_bytes")? / (1 << 20) as f64,
            operations: sum("total_ios")? as u64,
        })
    }
}
