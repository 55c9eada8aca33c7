# Docker set-up for quickstart and tests. Source it in a bash script:
#
#   . scripts/lib/docker.sh
#   ensure_docker                  # starts a daemon if none answers; on failure says what to do
#   image=$(ensure_image micro)    # builds the image if it is missing; prints its reference
#
# Both are idempotent. They announce every change on stderr before they make it.

ORCHESTRATE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

_say() { printf 'docker: %s\n' "$*" >&2; }

# Without a daemon this fails at once; one under load takes a while.
_docker_answers() { timeout 60 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# Installs the Debian packages after `--` unless all commands before it are installed.
_need() {
  local commands=() missing=()
  while [ "$1" != -- ]; do commands+=("$1"); shift; done
  shift
  local command
  for command in "${commands[@]}"; do
    command -v "$command" >/dev/null 2>&1 || missing+=("$command")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  if ! command -v apt-get >/dev/null 2>&1; then
    _say "missing: ${missing[*]}; there is no apt-get on this machine, so install them manually and run this again"
    return 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    _say "missing: ${missing[*]}; install them with: sudo apt-get install -y --no-install-recommends $*"
    return 1
  fi
  _say "installing $* with apt-get (missing: ${missing[*]})"
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >&2 ||
    { apt-get update >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >&2; }
}

# Starts dockerd, detached from this shell, and waits for it. Fails if it ends or does not answer within three minutes.
# The daemon outlives its caller, so it keeps none of the caller's open files: with one it would also keep its lock.
_start_dockerd() {
  local log=$1 pid i=0 end=$((SECONDS + 180))
  setsid -f bash -c '
    for fd in /proc/$$/fd/*; do
      fd=${fd##*/}
      if [ "$fd" -gt 2 ]; then eval "exec $fd>&-"; fi
    done
    echo $$ >"$1"
    exec dockerd >>"$2" 2>&1 </dev/null' _ "$log.pid" "$log"
  while [ "$SECONDS" -lt "$end" ]; do
    _docker_answers && return 0
    i=$((i + 1))
    if [ "$i" -gt 5 ]; then
      pid=$(cat "$log.pid" 2>/dev/null || true)
      [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null && return 1
    fi
    sleep 0.1
  done
  return 1
}

# _forget_dead PIDFILE NAME: removes the pid file of a program that was killed. After a kill -9 the number may belong
# to another process, or to one that nothing has collected, and the program then refuses to start. Fails if the
# program is running.
_forget_dead() {
  local file=$1 name=$2 pid status
  [ -e "$file" ] || return 0
  pid=$(cat "$file")
  status=$(sed -n 's/^\(Name\|State\):[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null | paste -sd ' ' -)
  case "$status" in
    "$name Z"*) ;;
    "$name "*) return 1 ;;
  esac
  _say "removing $file, left by a $name that was killed"
  rm -f "$file"
}

ensure_docker() {
  local log=/var/log/orchestrate-dockerd.log attempt
  if command -v docker >/dev/null 2>&1 && _docker_answers; then return 0; fi
  if [ -n "${DOCKER_HOST:-}" ]; then
    _say "no daemon answers at DOCKER_HOST=$DOCKER_HOST; start it, or unset DOCKER_HOST to use the daemon of this machine"
    return 1
  fi
  _need docker dockerd containerd -- docker.io || return 1
  _docker_answers && return 0
  if [ "$(id -u)" -ne 0 ]; then
    _say "no Docker daemon answers; start it (sudo systemctl start docker) and add your user to the group \`docker\`"
    return 1
  fi
  if [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; then
    _say "starting the docker service with systemctl"
    systemctl start docker >&2 && _docker_answers && return 0
  fi
  if ! _forget_dead /var/run/docker.pid dockerd; then
    _say "dockerd (process $(cat /var/run/docker.pid)) is running but does not answer within 60 s; restart it, or end it and run this again"
    return 1
  fi
  _forget_dead /var/run/docker/containerd/containerd.pid containerd || true
  if ! grep -q ' /sys/fs/cgroup' /proc/mounts; then
    _need cgroupfs-mount -- cgroupfs-mount || return 1
    _say "mounting the control groups (cgroupfs-mount)"
    cgroupfs-mount >&2 || return 1
  fi
  for attempt in 1 2; do
    _say "starting dockerd in the background, log in $log"
    : >"$log"
    _start_dockerd "$log" && return 0
    # Soon after a crash, the first start may give up waiting for containerd; the second one works.
    grep -q 'timeout waiting for containerd' "$log" || break
    _say "dockerd gave up waiting for containerd (try $attempt)"
  done
  _say "dockerd did not start; the end of $log:"
  tail -n 5 "$log" >&2
  return 1
}

# Prints what may explain why sandboxes failed: the daemon's containers, the end of its log, space, and which of
# its goroutines have been blocked for minutes.
docker_state() {
  local log=/var/log/orchestrate-dockerd.log pid stacks
  _say "state after the failure:"
  { df -h / /var/lib/docker 2>/dev/null; free -m; } >&2 || true
  timeout 20 docker ps -a --format '{{.Names}} {{.Image}} {{.Status}}' 2>&1 | tail -n 30 >&2
  pid=$(cat "$log.pid" 2>/dev/null || true)
  [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null || return 0
  kill -USR1 "$pid" 2>/dev/null && sleep 2
  stacks=$(sed -n 's/.*goroutine stacks written to \([^ "]*\).*/\1/p' "$log" | tail -n 1)
  if [ -r "$stacks" ]; then
    # A paragraph per goroutine: those that have worked on a container for minutes.
    awk -v RS= '/^goroutine [0-9]+ \[[^]]* minutes/ && /daemon\.\(\*Daemon\)\.(container|Container|create|start|Create|Kill|Cleanup)|libcontainerd.*(Create|Start|Delete)/ { print $0 "\n" }' "$stacks" |
      head -c 6000 >&2
  fi
  tail -n 20 "$log" | cut -c1-300 >&2
}

# Prints the tag of an environment's image: 12 digits of a hash of its recipe and the machine's architecture.
_recipe_tag() {
  local recipe=$1 file
  { uname -m
    for file in "$recipe/Dockerfile" "$recipe"/image/*; do
      printf '%s\n' "${file#"$recipe"/}"
      cat "$file"
    done
  } | sha256sum | cut -c1-12
}

_import_with_debootstrap() {
  local recipe=$1 reference=$2 root packages status=0
  if [ "$(id -u)" -ne 0 ]; then
    _say "no registry is reachable, and building $reference without one requires root (debootstrap)"
    return 1
  fi
  _need debootstrap tar -- debootstrap tar debian-archive-keyring || return 1
  root=$(mktemp -d "${TMPDIR:-/tmp}/orchestrate-image.XXXXXX") || return 1
  packages=$(grep -v '^#' "$recipe/image/packages.txt" | paste -sd, -)
  _say "no registry is reachable: building $reference from Debian packages with debootstrap (one or two minutes)"
  { debootstrap --variant=minbase --include="$packages" bookworm "$root/fs" \
      "${ORCHESTRATE_DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root/log" 2>&1 &&
    sh "$recipe/image/trim.sh" "$root/fs" >>"$root/log" 2>&1 &&
    tar -C "$root/fs" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
      docker import --change 'CMD ["/bin/sh"]' - "$reference" >/dev/null
  } || status=1
  if [ "$status" -ne 0 ]; then
    _say "building $reference failed; the end of its log:"
    tail -n 5 "$root/log" >&2
  fi
  rm -rf "$root"
  return "$status"
}

# ensure_image NAME: builds orchestrate/NAME from environments/NAME if the daemon does not have it, and prints
# its reference.
ensure_image() {
  local name=$1 recipe reference
  recipe=$ORCHESTRATE_ROOT/environments/$name
  if [ ! -f "$recipe/Dockerfile" ]; then
    _say "no image recipe in $recipe"
    return 1
  fi
  reference=orchestrate/$name:$(_recipe_tag "$recipe")
  if ! docker image inspect "$reference" >/dev/null 2>&1; then
    _say "image $reference does not exist yet; pulling its base image"
    if timeout 20 docker pull -q "$(sed -n 's/^FROM //p' "$recipe/Dockerfile")" >/dev/null 2>&1; then
      _say "building $reference from $recipe/Dockerfile"
      docker build -q -t "$reference" -f "$recipe/Dockerfile" "$recipe/image" >/dev/null || return 1
    else
      _import_with_debootstrap "$recipe" "$reference" || return 1
    fi
  fi
  docker tag "$reference" "orchestrate/$name:latest" || return 1
  printf '%s\n' "$reference"
}
