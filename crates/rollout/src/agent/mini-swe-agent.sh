export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
export LITELLM_LOCAL_MODEL_COST_MAP=True OPENAI_API_BASE="$OPENAI_BASE_URL" MSWEA_SILENT_STARTUP=1
run_module minisweagent.run.mini -m "openai/$MODEL" -t "$TASK_PROMPT" -y --exit-immediately -l 0 \
  -o /tmp/trajectory.json
