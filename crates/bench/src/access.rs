//! The program `access` (programs/access.c): reads or writes blocks in a loop so tight that the program itself costs almost
//! nothing. Also measures its ceilings: a plain copy and a lookup.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;
use crate::mounts::{compile, run};
use crate::settings::Settings;

const SOURCE: &str = include_str!("../programs/access.c");

/// How the bytes are copied.
#[derive(Clone, Copy)]
pub enum Engine {
    /// read, write, pread, pwrite.
    Calls,
    /// memcpy from or to a mapping of the file.
    Copy,
    /// Does what a hit must do, and no more: looks a page up in a table of the same shape, copies it and validates the lookup.
    Lookup,
}

/// The compiled program.
pub struct Access {
    program: PathBuf,
    jericho: PathBuf,
}

/// A run of the program.
#[derive(Clone, Copy)]
pub struct Loop<'a> {
    /// How the bytes are copied.
    pub engine: Engine,
    /// `read` or `write`.
    pub direction: &'a str,
    /// `random`, `sequential`, `hot` or `append`.
    pub order: &'a str,
    /// Bytes in an operation.
    pub block_bytes: u32,
    /// Duration of the measurement.
    pub seconds: f64,
}

impl Access {
    /// Compiles the program into the directory of the run.
    pub fn compile(settings: &Settings) -> Result<Access> {
        Ok(Access {
            program: compile(settings, "access", SOURCE, "-pthread")?,
            jericho: settings.jericho.clone(),
        })
    }

    /// Returns operations per second of one thread for each of `files`. With `inline`, runs as a program under `jericho run`.
    pub fn measure(&self, job: Loop, files: &[&Path], inline: bool) -> Result<f64> {
        let mut command = if inline {
            let mut command = Command::new(&self.jericho);
            command.args(["run", "--"]).arg(&self.program);
            command
        } else {
            Command::new(&self.program)
        };
        let engine = match job.engine {
            Engine::Calls => "call",
            Engine::Copy => "map",
            Engine::Lookup => "table",
        };
        command.args([engine, job.direction, job.order]);
        command.args([job.block_bytes.to_string(), job.seconds.to_string()]);
        let said = run(command.args(files))?;
        Ok(said
            .trim()
            .parse()
            .map_err(|e| format!("access printed no number ({e}): {said}"))?)
    }
}
