//! `jericho report`: reads results of `jericho bench` and a report of `jericho probe`, and writes a page. The crate `report` makes the page.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::ExitCode;

use jericho_report::{Cell, Grid, LINE_BYTES_MAX, Prediction, Probe, Results, compare};

use crate::args::ReportArgs;
use crate::bench::is_same_file;
use crate::failure::{Context, Failure, Outcome, print};
use crate::state;

pub fn run(args: &ReportArgs) -> Outcome {
    let inputs = args.compare.iter().chain(&args.files).chain(&args.probe);
    for input in inputs {
        refuse_overwrite(input, &args.out)?;
    }
    match args.compare.as_slice() {
        [first, second] => two(first, second, &args.out)?,
        _ => page(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if the page would replace what it is made from.
fn refuse_overwrite(input: &Path, out: &Path) -> Result<(), Failure> {
    // A file that is not there is reported where it is read.
    match is_same_file(input, out) {
        true => Err(Failure::new(format!(
            "{}: is an input, and --out would overwrite it; name another file",
            out.display()
        ))),
        false => Ok(()),
    }
}

fn page(args: &ReportArgs) -> Result<(), Failure> {
    let mut results = Results::default();
    for file in &args.files {
        read(&mut results, file)?;
    }
    let probe = probe(args.probe.as_deref())?;
    let page = jericho_report::report(&results, probe.as_ref(), &predictions()?);
    let page = page.context("the page")?;
    write(&args.out, &page, &results.notes)?;
    print(&format!(
        "{}: made from {} results\n",
        args.out.display(),
        results.runs.len()
    ))
}

fn two(first: &Path, second: &Path, out: &Path) -> Result<(), Failure> {
    let one = |path: &Path| {
        let mut results = Results::default();
        read(&mut results, path).map(|()| results)
    };
    let (first, second) = (one(first)?, one(second)?);
    let comparison = compare(&first, &second);
    let page = jericho_report::comparison(&comparison, [&first, &second]).context("the page")?;
    let mut notes = [first.notes.as_slice(), &second.notes].concat();
    if !comparison.machines_differ.is_empty() {
        notes.push(format!(
            "the files are of different machines: {} differ",
            comparison.machines_differ.join(", ")
        ));
    }
    write(out, &page, &notes)?;
    print(&format!("{}: {}\n", out.display(), comparison.summary()))
}

/// Reads a file of results. Holds one line of it at a time.
fn read(results: &mut Results, path: &Path) -> Result<(), Failure> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|e| {
        Failure::new(format!(
            "{name}: {e}; name a file that jericho bench --out has written"
        ))
    })?;
    let mut lines = BufReader::new(file);
    results.begin_file(&name);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut part = lines.by_ref().take(LINE_BYTES_MAX as u64 + 1);
        if part.read_until(b'\n', &mut line).context(&name)? == 0 {
            break;
        }
        if line.last() != Some(&b'\n') && line.len() > LINE_BYTES_MAX {
            return Err(Failure::new(format!(
                "{name}: line {number}: has more than {LINE_BYTES_MAX} bytes, so it is no result of jericho bench"
            )));
        }
        results
            .add_line(number, &line)
            .map_err(|e| Failure::new(e.to_string()))?;
    }
    results.end_file().map_err(|e| Failure::new(e.to_string()))
}

/// Predicts the papers' results for their machines.
fn predictions() -> Result<Vec<Prediction>, Failure> {
    let rows = jericho_model::rows(|name| jericho_model::shipped(name)?.ok());
    let rows = rows.context("the predictions of the cost model")?;
    let prediction = |row: jericho_model::Row| Prediction {
        id: row.id.to_owned(),
        value: row.model,
    };
    Ok(rows.into_iter().map(prediction).collect())
}

/// Reads the report of a probe: the one that the user names, or the one that is kept. A kept one that cannot be used is left out, with a
/// message.
fn probe(named: Option<&Path>) -> Result<Option<Probe>, Failure> {
    let Some(path) = named else {
        let Ok(Some(kept)) = state::probe_file() else {
            return Ok(None);
        };
        let name =
            "The probe is the report that this user or machine has kept, where the page was made.";
        return Ok(load(&kept, name).unwrap_or_else(|failure| {
            eprintln!("jericho: the page has no heat map: {failure}");
            None
        }));
    };
    let found = load(path, &format!("The probe is that of {}.", path.display()))?;
    found.map(Some).ok_or_else(|| {
        Failure::new(format!(
            "{}: there is no such file; name one that jericho probe --json has written",
            path.display()
        ))
    })
}

fn load(path: &Path, name: &str) -> Result<Option<Probe>, Failure> {
    let report = jericho_probe::load_any(path).map_err(|e| Failure::new(e.to_string()))?;
    Ok(report.map(|report| Probe {
        name: name.to_owned(),
        digest: report.topology.digest.clone(),
        cpu_model: report.machine.cpu_model.clone(),
        nodes: report.node_count(),
        head: jericho_probe::head(&report),
        grids: jericho_probe::grids(&report)
            .into_iter()
            .map(grid)
            .collect(),
    }))
}

fn grid(grid: jericho_probe::Grid) -> Grid {
    let cell = |cell: jericho_probe::Cell| Cell {
        color: cell.color(),
        is_dark: cell.is_dark(),
        text: cell.text,
    };
    let rows = grid.cells.into_iter();
    let rows = rows.map(|row| row.into_iter().map(|value| value.map(cell)).collect());
    Grid {
        title: grid.title,
        cells: rows.collect(),
    }
}

fn write(path: &Path, page: &str, notes: &[String]) -> Result<(), Failure> {
    for note in notes {
        eprintln!("jericho: {note}");
    }
    std::fs::write(path, page).context(format_args!("cannot write the page to {}", path.display()))
}
