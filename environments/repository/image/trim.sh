#!/bin/sh
# Removes files from the root folder $1 that commands in a sandbox never read: caches, manuals and
# package lists.
set -eu
root=${1:?usage: trim.sh ROOT}
root=${root%/}
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
  "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* \
  "$root"/var/cache/debconf/*-old "$root"/debootstrap
mkdir -p "$root/tmp" "$root/var/cache/apt/archives/partial"
chmod 1777 "$root/tmp"
