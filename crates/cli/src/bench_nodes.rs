//! The nodes of a run: those of the mounts that it measures, whose slices are at home on these nodes.

use std::path::{Path, PathBuf};

use jericho_topology::Topology;

use crate::control;
use crate::failure::Failure;

/// A target on a mount, and the origin of the mount's topology.
type OfMount<'a> = (&'a Path, String);

/// Returns the topology that the user specifies, else that of the targets' mounts, else that of the machine. Fails if a mount has another one: its node
/// numbers mean other CPUs.
pub fn of(spec: Option<&str>, targets: &[PathBuf]) -> Result<Topology, Failure> {
    // Files of a mount are used as devices, without their slices.
    let on_mounts = targets.iter().filter(|target| target.is_dir());
    let mounts = on_mounts.filter_map(|target| {
        let stat = control::stat(target).ok()?;
        Some((target.as_path(), stat.topology))
    });
    choose(spec, &mounts.collect::<Vec<_>>())
}

fn choose(spec: Option<&str>, mounts: &[OfMount]) -> Result<Topology, Failure> {
    let first = mounts.first();
    let chosen = spec.unwrap_or_else(|| first.map_or("auto", |(_, origin)| spec_of(origin)));
    let topology = Topology::from_spec(chosen).map_err(|error| match (spec, first) {
        (None, Some((target, origin))) => Failure::new(format!(
            "{}: its mount has the topology {origin}, which bench cannot use: {error}; name the topology with --topology",
            target.display()
        )),
        _ => Failure::new(error.to_string()),
    })?;
    match (
        mounts
            .iter()
            .find(|(_, origin)| !is_same(origin, &topology.source)),
        spec,
    ) {
        (None, _) => Ok(topology),
        (Some((target, origin)), Some(spec)) => Err(Failure::new(format!(
            "{}: its mount has the topology {origin}, and --topology is {spec}: their nodes are not the same; leave out --topology, or use --topology {}",
            target.display(),
            spec_of(origin)
        ))),
        (Some((target, origin)), None) => Err(Failure::new(format!(
            "{}: its mount has the topology {origin}, and the mount of another target has {}: their nodes are not the same; measure the mounts one after the other",
            target.display(),
            topology.source
        ))),
    }
}

/// Returns the specification that makes a topology of this origin.
fn spec_of(origin: &str) -> &str {
    match origin.starts_with("virtual:") || origin.starts_with("file:") {
        true => origin,
        false => "auto",
    }
}

/// Returns whether two topologies of these origins have the same nodes. A file may have several paths, so any two files count as the same here. A slice on a
/// node that the topology lacks is refused later.
fn is_same(one: &str, other: &str) -> bool {
    let both_are_files = one.starts_with("file:") && other.starts_with("file:");
    both_are_files || spec_of(one) == spec_of(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(origin: &str) -> OfMount<'static> {
        (Path::new("/mnt/jericho"), origin.to_owned())
    }

    #[test]
    fn the_nodes_are_the_users_or_the_mounts_or_the_machines() {
        let source = |spec, mounts: &[OfMount]| choose(spec, mounts).unwrap().source;
        assert_eq!(source(None, &[mount("virtual:3")]), "virtual:3");
        assert_eq!(
            source(Some("virtual:3"), &[mount("virtual:3")]),
            "virtual:3"
        );
        assert_eq!(source(Some("virtual:4"), &[]), "virtual:4");
        let machine = Topology::detect().unwrap().source;
        assert_eq!(source(None, &[]), machine);
        assert_eq!(source(None, &[mount(&machine)]), machine);
        assert_eq!(source(Some("auto"), &[mount("sysfs")]), machine);
    }

    #[test]
    fn other_nodes_than_those_of_a_mount_are_refused_and_both_are_named() {
        let refused = |spec, mounts: &[OfMount]| choose(spec, mounts).unwrap_err().to_string();
        let other = refused(Some("auto"), &[mount("virtual:2")]);
        assert!(other.contains("--topology is auto"), "{other}");
        assert!(other.contains("use --topology virtual:2"), "{other}");
        let real = refused(Some("virtual:2"), &[mount("sysfs")]);
        assert!(real.contains("use --topology auto"), "{real}");
        let two = refused(None, &[mount("virtual:2"), mount("virtual:4")]);
        assert!(two.contains("one after the other"), "{two}");
        let gone = refused(None, &[mount("file:/does/not/exist")]);
        assert!(gone.contains("/mnt/jericho: its mount"), "{gone}");
        assert!(gone.contains("with --topology"), "{gone}");
    }

    #[test]
    fn a_topology_file_may_be_named_by_another_path() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "node 0 cpus=0\n").unwrap();
        let spec = file.path().to_str().unwrap();
        choose(Some(spec), &[mount("file:nodes")]).unwrap();
        assert!(choose(Some(spec), &[mount("virtual:1")]).is_err());
    }
}
