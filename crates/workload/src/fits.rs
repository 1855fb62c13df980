//! Whether workloads fit the targets, the placement, the way and the generator that the user wants.

use crate::error::{Error, Result};
use crate::fio;
use crate::fs_mark;
use crate::kind::{Kind, Variant};
use crate::options::{Generator, Migration, Options};
use crate::placement::{Side, Way};
use crate::reach::Route;
use crate::schedule::check_threads;
use crate::target::Target;

/// The workloads that fit, and for those of `all` that do not, the reasons.
#[derive(Debug)]
pub(crate) struct Fitting {
    pub kinds: Vec<Kind>,
    pub left_out: Vec<String>,
}

/// Chooses the workloads. Fails if the only one does not fit, or none does.
pub(crate) fn choose(targets: &[Target], options: &Options, route: Route) -> Result<Fitting> {
    let check = |kind: Kind| check_kind(kind, targets, options, route);
    if let [kind] = options.kinds[..] {
        check(kind)?;
    }
    let (mut kinds, mut left_out) = (Vec::new(), Vec::new());
    for kind in &options.kinds {
        match check(*kind) {
            Ok(()) => {
                kinds.push(*kind);
                left_out.extend(variants_left_out(*kind, options));
            }
            Err(why) => left_out.push(why.to_string()),
        }
    }
    if kinds.is_empty() {
        let reasons = left_out.join("; ");
        return Err(Error::new(format!("no workload fits: {reasons}")));
    }
    Ok(Fitting { kinds, left_out })
}

/// Returns why the generator leaves out forms of a workload, if the user has not chosen the forms.
fn variants_left_out(kind: Kind, options: &Options) -> impl Iterator<Item = String> {
    let variants = kind.variants().iter();
    let checked = variants.filter_map(move |variant| {
        let checked = options.generator.check_variant(kind, *variant);
        checked.err().map(|why| why.to_string())
    });
    checked.filter(|_| options.variants.is_empty())
}

/// Fails if the targets are none, the same, or of several kinds.
pub(crate) fn check_targets(targets: &[Target]) -> Result<()> {
    let first = targets
        .first()
        .ok_or_else(|| Error::new("name a directory or a device"))?;
    for (index, target) in targets.iter().enumerate() {
        if target.is_directory != first.is_directory {
            return Err(Error::new("name directories or devices, not both"));
        }
        if target.is_jericho != first.is_jericho {
            return Err(Error::new(
                "name directories on Jericho volumes or others, not both: they are measured in different ways",
            ));
        }
        if targets[..index].iter().any(|other| other.is_same(target)) {
            return Err(Error::new(format!(
                "{}: is named twice; name each target once",
                target.path.display()
            )));
        }
    }
    Ok(())
}

/// Fails if Jericho shall move threads, and cannot.
pub(crate) fn check_migration(targets: &[Target], options: &Options, route: Route) -> Result<()> {
    if options.migration == Migration::Never {
        return Ok(());
    }
    let reason = if options.placement.transfer != Side::Free {
        format!(
            "the placement {} binds the threads, so Jericho moves none; use --placement native",
            options.placement.name
        )
    } else if route == Route::Process {
        "Jericho moves no thread of a program that opens the volume itself; mount the volume".into()
    } else if let Some(other) = targets.iter().find(|target| !target.is_jericho) {
        format!(
            "{} is no directory on a Jericho mount, where Jericho moves threads; name such a directory",
            other.path.display()
        )
    } else {
        return Ok(());
    };
    let name = options.migration.name();
    Err(Error::new(format!("--migration {name}: {reason}")))
}

/// Fails if a workload cannot run with these options.
fn check_kind(kind: Kind, targets: &[Target], options: &Options, route: Route) -> Result<()> {
    options.placement.check(kind.way(), kind.name())?;
    if kind == Kind::Mstress && options.with_mstress {
        return Err(Error::new(
            "mstress is the workload already; leave out --with-mstress",
        ));
    }
    if !targets[0].is_directory && !kind.runs_on_devices() {
        return Err(Error::new(format!(
            "{} makes files, and {} is no directory; name a directory",
            kind.name(),
            targets[0].path.display()
        )));
    }
    if let Some(threads) = &options.threads {
        check_threads(kind, threads)?;
    }
    if kind.way() == Way::Memory && options.migration != Migration::Never {
        return Err(Error::new(format!(
            "{} accesses no file, so Jericho moves none of its threads; leave out --migration",
            kind.name()
        )));
    }
    check_route(kind, targets, route)?;
    check_generator(kind, options, route)
}

/// Fails if the workload cannot take this way to its data.
fn check_route(kind: Kind, targets: &[Target], route: Route) -> Result<()> {
    if route != Route::Fast {
        return Ok(());
    }
    if let Some(other) = targets.iter().find(|target| !target.is_jericho) {
        return Err(Error::new(format!(
            "{}: is on no Jericho mount, so no access is inline there; leave out --path fast",
            other.path.display()
        )));
    }
    match kind.way() {
        Way::Cached => Ok(()),
        Way::Memory => Err(Error::new(format!(
            "{} accesses no file; leave out --path fast",
            kind.name()
        ))),
        Way::Direct => Err(Error::new(format!(
            "{} uses direct I/O, which is never inline; leave out --path fast, or choose a workload that reads cached files",
            kind.name()
        ))),
    }
}

/// Fails if the generator cannot run the workload.
fn check_generator(kind: Kind, options: &Options, route: Route) -> Result<()> {
    let generator = &options.generator;
    if *generator == Generator::Own {
        return Ok(());
    }
    if route == Route::Process {
        return Err(Error::new(format!(
            "{} cannot use a volume in this process; mount the volume",
            generator.name()
        )));
    }
    if options.with_mstress {
        return Err(Error::new(
            "--with-mstress is for our own threads; leave out --generator",
        ));
    }
    match generator {
        Generator::Own => Ok(()),
        Generator::Fio(_) => fio::check(kind, options.placement),
        Generator::FsMark(_) => {
            fs_mark::check(kind)?;
            let named =
                |variant: &Variant| options.variants.iter().any(|name| name == variant.name);
            let mut chosen = kind.variants().iter().filter(|variant| named(variant));
            chosen.try_for_each(|variant| generator.check_variant(kind, *variant))
        }
    }
}
