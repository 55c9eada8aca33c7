export CODEX_HOME="$HOME/.codex" GATEWAY_KEY="$OPENAI_API_KEY"
mkdir -p "$CODEX_HOME"
exec "$AGENT_DIR/codex" exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -m "$MODEL" -c model_provider=gateway -c model_context_window="$MODEL_CONTEXT" \
  -c check_for_update_on_startup=false -c analytics.enabled=false \
  -c 'model_providers.gateway={name="gateway",base_url="'"$OPENAI_BASE_URL"'",env_key="GATEWAY_KEY",wire_api="responses"}' \
  "$TASK_PROMPT"
