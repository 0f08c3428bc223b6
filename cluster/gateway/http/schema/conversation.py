"""ConversationFields: a conversation in OpenAI's form, of every endpoint whose prompt may be one."""

from __future__ import annotations

from pydantic import Field

from ....text.requests.chat import Chat
from .bounded import JsonObject, JsonObjects, TextOrObject
from .request_model import RequestModel


class ConversationFields(RequestModel):
    """A conversation, and how the template renders it."""

    messages: JsonObjects | None = Field(
        None, description="Oldest first; roles and parts that the model's template knows."
    )
    tools: JsonObjects | None = None
    tool_choice: TextOrObject | None = Field(
        None, description="none, auto, required, a function or allowed_tools."
    )
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")
    documents: JsonObjects | None = None
    mm_processor_kwargs: JsonObject | None = Field(
        None, description="Settings of the model's image processor for these images."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def chat(self) -> Chat:
        """Return the conversation, which the service checks."""
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
        return Chat(
            self.messages or (),
            continue_final_message=self.continue_final_message,
            template_options=options,
            tools=self.tools or (),
            tool_choice="auto" if self.tool_choice is None else self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            documents=self.documents or (),
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            image_settings=self.mm_processor_kwargs or {},
        )
