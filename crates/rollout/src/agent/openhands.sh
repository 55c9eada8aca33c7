export LLM_MODEL="openai/$MODEL" LLM_BASE_URL="$OPENAI_BASE_URL" LLM_API_KEY="$OPENAI_API_KEY"
export LITELLM_LOCAL_MODEL_COST_MAP=True OPENHANDS_SUPPRESS_BANNER=1
run_module openhands_cli.entrypoint --headless --json --override-with-envs --always-approve \
  --exit-without-confirmation -t "$TASK_PROMPT"
