#!/bin/bash
# Writes the hidden tests over the agent's tree, runs them and grades their output.
cd @WORKDIR@ || exit 1
log=$(mktemp)
while IFS= read -r folder; do
    rm -rf -- "./$folder"
done < /tests/cleared.txt
(cd /tests/hidden && find . -type f) | while IFS= read -r file; do
    rm -rf -- "$file"
    mkdir -p "$(dirname "$file")"
    cp "/tests/hidden/$file" "$file"
done
bash /tests/command.sh > "$log" 2>&1
cat "$log"
python3 -I /tests/grade.py "$log" /tests/expected.json > /logs/verifier/reward.txt
