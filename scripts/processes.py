"""What the scripts that compare filesystems share: running a command, and ending with a message."""

import pathlib
import subprocess
import sys


def die(text):
    """Ends the script with a message that begins with its name."""
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {text}")


def call(*command, **options):
    """Runs a command and returns its standard output. Ends the script if the command fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        die(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return done.stdout
