//! The systemd units. `make systemd` runs them.

use std::path::Path;
use std::process::Command;

use super::support::{jericho, output};

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("SKIPPED: systemd-analyze is missing");
        return;
    }
    let program = jericho(["x"]).get_program().to_owned();
    let directory = Path::new(&program).parent().expect("a directory");
    let dir = tempfile::tempdir().expect("a directory");
    for (unit, instance) in [("jericho@", "srv-data"), ("jericho-serve@", "data")] {
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
        let text = std::fs::read_to_string(packaging.join(format!("{unit}.service")));
        // systemd-analyze also looks whether the program exists.
        let installed = format!("{}/", directory.display());
        let text = text.expect("a unit").replace("/usr/local/bin/", &installed);
        let path = dir.path().join(format!("{unit}{instance}.service"));
        std::fs::write(&path, text).expect("a file");
        let mut command = Command::new("systemd-analyze");
        // It succeeds in spite of some of its findings.
        let output = output(command.args(["verify", "--man=no"]).arg(&path));
        let said = [output.stdout, output.stderr].concat();
        assert_eq!(String::from_utf8_lossy(&said), "", "{unit}");
        assert!(output.status.success(), "{unit}: {}", output.status);
    }
}
