"""`tokenmill service install | show`: a systemd service that runs the server.

The unit is `Type=notify`: the service counts as started once the server is ready (`server/service_notify.py`), and
systemd restarts it if its watchdog notifications stop, as after an engine was given up. The process can only write to
its own folders.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tokenmill.errors import InvalidConfig

command = App(help="Install a server as a systemd service.", help_flags=["--help", "-h"], version_flags=[])

NAME = "tokenmill.service"
SYSTEM_FOLDER = Path("/etc/systemd/system")
Argument = Annotated[str, Parameter(help="Arguments of `tokenmill serve`, after a `--`.", allow_leading_hyphen=True)]
User = Annotated[bool, Parameter(negative="", help="Install a user service, without root.")]
HARDENING = """\
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
"""


def unit(program: str, arguments: tuple[str, ...], *, user: bool) -> str:
    """Return the text of the unit. A user service can't drop capabilities or change its user, so it is less
    isolated."""
    words = " ".join(shlex.quote(word).replace("%", "%%") for word in ("serve", *arguments))
    hardening = HARDENING + ("" if user else "CapabilityBoundingSet=\nAmbientCapabilities=\nPrivateDevices=no\n")
    home = "%h/.cache/tokenmill" if user else "/var/lib/tokenmill"
    account = "" if user else "DynamicUser=yes\nStateDirectory=tokenmill\nStateDirectoryMode=0700\n"
    writable = f"ReadWritePaths=-{home}\n" if user else ""
    return f"""\
[Unit]
Description=Tokenmill LLM inference server
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={program} {words}
ExecReload=/bin/kill -HUP $MAINPID
Environment=TOKENMILL_HOME={home}
{account}{writable}Restart=on-failure
RestartSec=5
TimeoutStartSec=30min
TimeoutStopSec=60
WatchdogSec=60
LimitNOFILE=65536
KillMode=mixed
{hardening}
[Install]
WantedBy={"default" if user else "multi-user"}.target
"""


@command.command
def show(*arguments: Argument, user: User = False) -> int:
    """Print the systemd unit without installing it."""
    print(unit(program(), arguments, user=user), end="")
    return 0


@command.command
def install(*arguments: Argument, user: User = False, force: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Install the systemd unit, and print how to start it.

    Parameters
    ----------
    force
        Replace an existing unit.
    """
    folder = Path.home() / ".config/systemd/user" if user else SYSTEM_FOLDER
    path = folder / NAME
    if path.exists() and not force:
        raise InvalidConfig(f"{path} exists already", hint="--force replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(unit(program(), arguments, user=user), encoding="utf-8")
        if user:
            (Path.home() / ".cache/tokenmill").mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        hint = "--user does not need root" if not user else None
        raise InvalidConfig(f"{path} can't be written: {problem.strerror}", hint=hint) from None
    control = "systemctl --user" if user else "systemctl"
    print(f"{path} is installed. To start the server now and at every boot:")
    print(f"  {control} daemon-reload\n  {control} enable --now {NAME}")
    if user:
        print("  loginctl enable-linger   # to let it run while you are not logged in")
    return 0


def program() -> str:
    """The command that starts this package, with its whole path, as systemd wants it."""
    beside = Path(sys.executable).with_name("tokenmill")
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m tokenmill"
