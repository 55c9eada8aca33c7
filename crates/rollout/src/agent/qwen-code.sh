export OPENAI_MODEL="$MODEL" QWEN_TELEMETRY_ENABLED=0
exec "$AGENT_DIR/node" "$AGENT_DIR/qwen-code/cli.js" -p "$TASK_PROMPT" --yolo --auth-type openai \
  --output-format json
