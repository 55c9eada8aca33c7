export OPENAI_API_BASE="$OPENAI_BASE_URL" LITELLM_LOCAL_MODEL_COST_MAP=True
cat >/tmp/aider.models.json <<MODELS
{"openai/$MODEL": {"max_input_tokens": $MODEL_CONTEXT, "max_tokens": $MODEL_CONTEXT,
 "input_cost_per_token": 0, "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}}
MODELS
run_module aider --model "openai/$MODEL" --weak-model "openai/$MODEL" --model-metadata-file /tmp/aider.models.json \
  --edit-format diff --message "$TASK_PROMPT" --yes-always --no-auto-commits --no-dirty-commits --no-gitignore \
  --no-check-update --no-show-release-notes --no-show-model-warnings --analytics-disable --no-pretty --no-fancy-input \
  --no-auto-lint --no-detect-urls --disable-playwright --input-history-file /tmp/aider.input --chat-history-file /tmp/aider.md
status=$?
# Its index of the repository is not part of the solution.
rm -rf .aider.tags.cache.v*
exit $status
