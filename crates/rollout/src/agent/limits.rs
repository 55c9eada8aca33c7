//! What Linux can pass to a new process: an agent whose prompt or variables are larger could not be
//! started, in no attempt.

use super::AgentSettings;
use crate::config::RolloutSettings;
use orchestrate_tasks::Task;

/// Maximum size of one argument, or of one variable with its name, in bytes (`MAX_ARG_STRLEN` less the
/// final NUL).
pub(crate) const STRING_BYTES: usize = (128 << 10) - 1;

/// Maximum size of the arguments and variables together, in bytes: the least that Linux allows is 2 MiB, of which the
/// image's own variables need some.
const TOTAL_BYTES: usize = 1 << 20;

impl AgentSettings {
    /// Why no process can be given this task, or `None`.
    pub fn obstacle(&self, settings: &RolloutSettings, task: &Task) -> Option<String> {
        let opening = settings.opening(task);
        let prompt = opening.last().map_or("", |message| message.content.as_str());
        let own = self.env.iter().filter_map(|variable| variable.split_once('='));
        let variables = task.variables().chain([("TASK_PROMPT", prompt)]).chain(own);
        let mut total = self.script().map_or(0, str::len);
        for (name, value) in variables {
            let bytes = name.len() + 1 + value.len();
            if bytes > STRING_BYTES {
                let most = STRING_BYTES - name.len() - 1;
                return Some(format!("{name} has {} bytes, and at most {most} fit", value.len()));
            }
            if value.contains('\0') {
                return Some(format!("{name} has a NUL character"));
            }
            total += bytes + 1;
        }
        let is_larger = total > TOTAL_BYTES;
        is_larger
            .then(|| format!("its variables have {total} bytes, and at most {TOTAL_BYTES} fit"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::AgentSection;
    use crate::config::RolloutSection;
    use orchestrate_testkit::toy_task;

    fn obstacle(task_prompt: &str, env: Vec<String>) -> Option<String> {
        let section =
            AgentSection { command: Some("run".into()), env: Some(env), ..Default::default() };
        let settings =
            RolloutSection { task_prompt: Some(task_prompt.into()), ..Default::default() };
        section.check().unwrap().obstacle(&settings.check().unwrap(), &toy_task())
    }

    #[test]
    fn what_no_process_can_be_given_is_named_with_its_size() {
        let task = toy_task().problem_statement.len();
        let prompt = |bytes: usize| format!("{{problem_statement}}{}", "x".repeat(bytes - task));
        let most = STRING_BYTES - "TASK_PROMPT=".len();
        assert_eq!(obstacle(&prompt(most), Vec::new()), None);
        let text = obstacle(&prompt(most + 1), Vec::new()).unwrap();
        assert_eq!(text, format!("TASK_PROMPT has {} bytes, and at most {most} fit", most + 1));
        // Bytes count, not characters.
        let wide = format!("{{problem_statement}}{}", "é".repeat(most / 2 + 1));
        assert!(obstacle(&wide, Vec::new()).is_some());
        let nul = obstacle("{problem_statement}\0", Vec::new()).unwrap();
        assert_eq!(nul, "TASK_PROMPT has a NUL character");
        let many = (0..12).map(|i| format!("A{i}={}", "y".repeat(100_000))).collect();
        assert!(obstacle("{problem_statement}", many).unwrap().contains("its variables have"));
    }
}
