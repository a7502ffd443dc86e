"""LangChain's standard tests of a chat model, for its OpenAI (chat and Responses), Anthropic and Ollama classes."""

from __future__ import annotations

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]


class TestOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {"base_url": f"{URL}/v1", "api_key": "unused", "model": MODEL, "temperature": 0, "stream_usage": True}


class TestResponses(TestOpenAI):
    @property
    def chat_model_params(self) -> dict:
        return {**super().chat_model_params, "use_responses_api": True}


class TestAnthropic(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict:
        return {"base_url": URL, "api_key": "unused", "model": MODEL, "max_tokens": 200}


class TestOllama(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict:
        return {"base_url": URL, "model": MODEL, "temperature": 0, "num_predict": 200}

    @property
    def has_tool_choice(self) -> bool:
        return False
