export IS_SANDBOX=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="$MODEL_CONTEXT"
exec "$AGENT_DIR/claude" -p "$TASK_PROMPT" --model "$MODEL" --output-format stream-json --verbose \
  --dangerously-skip-permissions --bare
