"""Stands in for Docker Compose where the Docker client has no such plugin.

Does for one service, `main`, what Harbor's own Docker environment asks of Compose: build, up, exec,
cp, stop and down. It runs with the Python of the Harbor package, which has `yaml`.
"""

import json
import os
import re
import subprocess
import sys

METADATA = {
    "SchemaVersion": "0.1.0",
    "Vendor": "orchestrate tests",
    "Version": "v2.0.0",
    "ShortDescription": "Stands in for Docker Compose",
}
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


def merged(files):
    import yaml

    main = {}
    for file in files:
        with open(file, encoding="utf-8") as text:
            content = VARIABLE.sub(
                lambda found: os.environ.get(found[1], found[2] or ""), text.read()
            )
        service = (yaml.safe_load(content).get("services") or {}).get("main") or {}
        for key, value in service.items():
            if isinstance(value, dict):
                main.setdefault(key, {}).update(value)
            elif isinstance(value, list) and key == "volumes":
                main.setdefault(key, []).extend(value)
            else:
                main[key] = value
    return main


def docker(*args, **options):
    return subprocess.run(["docker", *args], **options).returncode


def up(project, service):
    docker("rm", "-f", "-v", f"{project}-main-1", capture_output=True)
    argv = ["run", "--detach", "--name", f"{project}-main-1"]
    argv += ["--label", f"com.docker.compose.project={project}"]
    if "network_mode" in service:
        argv += ["--network", service["network_mode"]]
    for name, value in (service.get("environment") or {}).items():
        argv += ["--env", f"{name}={value}"]
    for volume in service.get("volumes") or []:
        argv += ["--volume", f"{volume['source']}:{volume['target']}"]
    if "cpus" in service:
        argv += ["--cpus", str(min(float(service["cpus"]), os.cpu_count()))]
    if "mem_limit" in service:
        argv += ["--memory", service["mem_limit"]]
    image = service.get("image") or f"{project}-main"
    return docker(*argv, image, *service["command"])


def execute(project, args):
    argv = ["exec"]
    while args and args[0].startswith("-"):
        flag = args.pop(0)
        if flag in ("-w", "-e", "-u"):
            argv += [flag, args.pop(0)]
        elif flag in ("-T", "--no-TTY"):
            argv += ["-i"]
    args.pop(0)
    return docker(*argv, f"{project}-main-1", *args)


def main(args):
    if args[:1] == ["docker-cli-plugin-metadata"]:
        print(json.dumps(METADATA))
        return 0
    args = args[1:] if args[:1] == ["compose"] else args
    if args[:1] == ["version"]:
        print("Docker Compose version v2.0.0")
        return 0
    project, files = "", []
    while args and args[0].startswith("-"):
        flag = args.pop(0)
        if flag == "--project-name":
            project = args.pop(0)
        elif flag == "-f":
            files.append(args.pop(0))
        elif flag == "--project-directory":
            args.pop(0)
    command, args = args[0], args[1:]
    if command == "build":
        return docker("build", "-t", f"{project}-main", merged(files)["build"]["context"])
    if command == "up":
        return up(project, merged(files))
    if command == "exec":
        return execute(project, args)
    if command == "cp":
        paths = [re.sub("^main:", f"{project}-main-1:", path) for path in args]
        return docker("cp", *paths)
    if command == "stop":
        return docker("stop", "--time", "1", f"{project}-main-1")
    if command == "down":
        docker("rm", "-f", "-v", f"{project}-main-1", capture_output=True)
        if "--rmi" in args:
            docker("rmi", f"{project}-main", capture_output=True)
        return 0
    print(f"{command} is not known here", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
