#!/bin/bash
set -e
cd @WORKDIR@
while IFS= read -r path; do
    rm -f -- "$path"
done < /solution/removed.txt
if [ -d /solution/files ]; then
    cp -r /solution/files/. .
fi
