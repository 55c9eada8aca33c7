#!/bin/sh
# Removes files from the root folder $1 that commands in a sandbox never read: caches, manuals,
# translations and package lists. This makes the image small and its import fast.
set -eu
root=${1:?usage: trim.sh ROOT}
root=${root%/}
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
  "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* \
  "$root"/usr/share/locale/* "$root"/usr/share/lintian "$root"/usr/share/bug \
  "$root"/usr/share/pixmaps "$root"/usr/share/zoneinfo "$root"/var/cache/debconf/*-old \
  "$root"/usr/lib/python3*/ensurepip "$root"/usr/lib/python3*/pydoc_data \
  "$root"/usr/lib/python3*/lib2to3 "$root"/usr/lib/python3*/distutils "$root"/debootstrap
find "$root/usr/lib" -name gconv -type d -prune -exec rm -rf {} +
mkdir -p "$root/tmp" "$root/var/cache/apt/archives/partial"
chmod 1777 "$root/tmp"
