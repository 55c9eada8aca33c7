export OPENCODE_CONFIG=/tmp/opencode.json
cat >"$OPENCODE_CONFIG" <<CONFIG
{"autoupdate": false, "share": "disabled", "model": "gateway/$MODEL", "small_model": "gateway/$MODEL",
 "provider": {"gateway": {"npm": "@ai-sdk/openai-compatible", "name": "gateway",
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
  "models": {"$MODEL": {"name": "$MODEL", "limit": {"context": $MODEL_CONTEXT, "output": 8192}}}}}}
CONFIG
exec "$AGENT_DIR/opencode" run --format json -m "gateway/$MODEL" --title task "$TASK_PROMPT"
